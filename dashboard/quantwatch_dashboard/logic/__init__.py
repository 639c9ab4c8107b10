"""The pure middle: from records to what pages say and draw. No clock, no database, no page."""
