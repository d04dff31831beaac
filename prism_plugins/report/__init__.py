"""What a run means: where its time goes, what to change, and the report that shows it."""
