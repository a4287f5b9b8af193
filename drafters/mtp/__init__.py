"""Multi-token prediction: layers that come with a target and predict tokens beyond its next one."""
