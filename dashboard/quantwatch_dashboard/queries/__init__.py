"""Every read of the database, one module per subject. Only these and `actions` know the store."""
