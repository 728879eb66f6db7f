"""List what the streams of the speech benchmark say."""

SENTENCES = (
    "There are two red circles and a blue square in this picture.",
    "The green star is bigger than the yellow circle beside it.",
    "Can you tell me how many of these small squares are white?",
    "My brother has never seen the sea in the middle of winter.",
    "Nobody knows why the old clock on the wall stopped at noon.",
    "She put the letters into a drawer and closed it without a word.",
    "After a long walk we had some bread and tea by the river.",
    "Please move the black circle a little further to the left.",
)
