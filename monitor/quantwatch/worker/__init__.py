"""Claims queued runs, keeps their leases alive, measures, and gives them back."""
