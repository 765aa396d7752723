"""Running megamoe on another machine through the system's ssh and rsync. docs/remote.md says how the parts fit."""
