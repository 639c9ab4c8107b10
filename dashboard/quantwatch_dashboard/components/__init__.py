"""Parts of pages: functions from data to markup, and the few that own a widget and its state key."""
