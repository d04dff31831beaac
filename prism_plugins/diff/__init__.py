"""A prediction beside a real run of the same job."""
