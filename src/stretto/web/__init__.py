"""What answers the questions of the front end (`view/front/`): in a worker of the page, or in the studio."""
