"""From a prepared log to a trained model."""
