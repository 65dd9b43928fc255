"""What an exported folder must do in a user's hands; needs torch and transformers only, any version from 4.48 on."""
