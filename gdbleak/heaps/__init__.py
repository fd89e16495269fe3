"""Who handed the bytes out. Each heap finds itself in a target, lists its blocks and checks its sums."""
