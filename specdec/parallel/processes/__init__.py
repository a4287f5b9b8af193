"""The processes of a group's ranks: how they are started, meet and end."""
