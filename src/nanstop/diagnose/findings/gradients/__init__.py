"""3xx: gradients and the loss scaler."""
