"""The pytest plugin: tests that name topologies run there. `emulate.pytest_plugin.entry` is the entry point."""
