"""What lets one look: the page of one generation (`eesd trace`) and a server's live figures (`eesd top`)."""
