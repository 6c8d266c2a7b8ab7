"""The stages that turn problems into a checkpoint: warm start, Stage I, collection, Stage II."""
