"""The parts of scripts/campaign, and what they share."""
