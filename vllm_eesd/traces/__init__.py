"""What drafting did, or would have done, in files: `dense` for replays, `rounds` of a server; and a page of either."""
