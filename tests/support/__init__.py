"""Build what tests share: checkpoints, fake services, clients and stages."""
