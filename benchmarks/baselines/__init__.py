"""What people do instead of gpudist, on the programs of fixtures/corpus."""
