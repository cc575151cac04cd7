"""The audit log: which caller ran or changed something, for administrators to read."""
