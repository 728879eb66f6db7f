"""List names, and the topics and question forms that the model learns to decline."""

from __future__ import annotations

NAMES = tuple(
    "Anna Ben Clara David Emma Felix Grace Hugo Ines Jonas Kim Laura Marco Nina Omar Paula Quinn Rosa Sam Tom "
    "Uma Victor Wanda Yusuf Zoe Alice Bob Maria John Sofia Liam Chen Priya Ahmed Olga Peter Lucy Max Eva Ivan".split()
)
PLACES = tuple(
    "France Germany Spain Italy Japan China Brazil India Canada Mexico Egypt Kenya Norway Sweden Poland Turkey Peru "
    "Chile Greece Russia Paris London Berlin Madrid Rome Tokyo Beijing Boston Chicago Cairo Vienna Prague Oslo Lima "
    "Australia Africa Europe Asia America England Ireland Portugal Austria Switzerland Texas California Florida "
    "Amsterdam Sydney Moscow Mumbai Seoul Bangkok Singapore Dublin Hamburg Munich Naples Venice Athens".split()
)
_ALL_THINGS = tuple(
    "weather rain snow music football chess history physics chemistry biology money bitcoin bread cheese pizza pasta "
    "coffee tea wine beer water milk dog cat horse elephant whale tiger bird fish tree flower river mountain ocean "
    "moon sun planet galaxy car train plane bicycle bus ship computer phone internet software python javascript "
    "database program algorithm poem story song novel film movie book newspaper king queen president minister actor "
    "singer doctor teacher lawyer hospital school university church castle bridge tower hotel restaurant kitchen "
    "garden house apartment chair table lamp window door shirt shoes hat jacket dress medicine virus cancer fever "
    "headache war peace election democracy government tax law police prison market bank stock company factory robot "
    "engine battery electricity gravity energy atom molecule oxygen gold silver iron stone sand glass paper language "
    "grammar english french spanish german latin philosophy religion psychology economics marketing recipe cake soup "
    "salad apple banana potato tomato rice sugar salt butter chocolate birthday holiday christmas summer winter "
    "tomorrow yesterday sleep dream love happiness friendship family mother brother baby marriage job salary interview "
    "email letter password website camera television radio guitar piano violin drum dance painting museum theatre "
    "dinosaur dragon ghost magic superhero olympics tennis basketball swimming marathon volcano earthquake hurricane "
    "desert forest island beach climate pollution recycling vaccine surgery brain heart blood bone skin tooth "
    "eye".split()
)
HELD_OUT_THINGS = _ALL_THINGS[::8]
THINGS = tuple(thing for thing in _ALL_THINGS if thing not in HELD_OUT_THINGS)

OUT_OF_WORLD = (
    "What is the capital of {p}?",
    "What is the capital city of {p}?",
    "What is the weather like in {p}?",
    "How is the weather in {p} today?",
    "Will it rain tomorrow in {p}?",
    "Will it rain tomorrow?",
    "What is the weather today?",
    "How many people live in {p}?",
    "How far is {p} from {t}?",
    "How far is it to {p}?",
    "Who is the president of {p}?",
    "Who is the king of {p}?",
    "Who was the first president of {p}?",
    "Who is {w}?",
    "Who invented the {t}?",
    "Who discovered {t}?",
    "Who wrote the {t}?",
    "Who won the {t} in {n}?",
    "What happened in {n}?",
    "What happened in {p} in {n}?",
    "When was the {t} invented?",
    "When did the {t} end?",
    "When is {t}?",
    "Where is {p}?",
    "Where can I buy {t}?",
    "Where does {t} come from?",
    "Why is the {t} so {o}?",
    "Why do we need {t}?",
    "Why is there {t} in {p}?",
    "How does {t} work?",
    "How do I make {t}?",
    "How do I cook {t}?",
    "How do I get to {p}?",
    "How do I learn {t}?",
    "How old is the {t}?",
    "How much does a {t} cost?",
    "How much is a {t} in {p}?",
    "What is {t}?",
    "What is a {t}?",
    "What is the {t}?",
    "What is the meaning of {t}?",
    "What is the meaning of life?",
    "What is the best {t} in {p}?",
    "What is the difference between {t} and {o}?",
    "What time is it?",
    "What time is it in {p}?",
    "What day is it today?",
    "What do you think about {t}?",
    "What language do they speak in {p}?",
    "What is the price of {t}?",
    "What is the population of {p}?",
    "Which {t} is the best?",
    "Which is better, {t} or {o}?",
    "Can you explain {t}?",
    "Can you write a {t} about {o}?",
    "Can you recommend a {t}?",
    "Can you book a {t} in {p} for me?",
    "Do you like {t}?",
    "Do you know anything about {t}?",
    "Do you know {w}?",
    "Is {t} healthy?",
    "Is {p} a nice place?",
    "Is there {t} on the {o}?",
    "Tell me a joke.",
    "Tell me a joke about {t}.",
    "Tell me a story about a {t}.",
    "Tell me about {t}.",
    "Tell me about {p}.",
    "Tell me something about {t} and {o}.",
    "Tell me the news.",
    "Write a {t} about {o}.",
    "Write a poem about {t}.",
    "Write python code that sorts a list.",
    "Write a {t} program in python.",
    "Write a function for {t}.",
    "Write an email to {w} about {t}.",
    "Explain {t}.",
    "Explain {t} to a child.",
    "Explain how {t} works.",
    "Translate {t} into french.",
    "Translate this sentence into {t}.",
    "Summarize the {t}.",
    "Give me a recipe for {t}.",
    "Give me advice about {t}.",
    "Help me with my {t}.",
    "I need help with {t}.",
    "I want to learn about {t}.",
    "I have a question about {t}.",
    "Play some {t}.",
    "Play {t} by {w}.",
    "Send a message to {w}.",
    "Call {w}.",
    "Book a flight to {p}.",
    "Search the web for {t}.",
    "Define {t}.",
    "Should I buy a {t}?",
    "Are you better than a {t}?",
    "Plan a trip to {p}.",
    "Remind me to buy {t}.",
    "Turn on the {t}.",
    "Set a timer for {n} minutes.",
)
