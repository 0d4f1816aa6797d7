"""What tests share: helpers, stand-ins for kernels, models. No test lies here."""
