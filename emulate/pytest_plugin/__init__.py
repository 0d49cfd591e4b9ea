"""Run tests that name topologies there, as a pytest plugin. `emulate.pytest_plugin.entry` is the entry point."""
