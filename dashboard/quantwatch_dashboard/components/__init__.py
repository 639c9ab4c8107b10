"""Parts of pages: functions from data to markup, and few that own a widget and its state."""
