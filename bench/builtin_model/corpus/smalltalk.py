# ruff: noqa: E501 (tables of sentences read best on long lines)
"""Small talk: greetings, feelings, questions about the assistant, thanks, jokes, and names remembered over turns."""

from __future__ import annotations

import re
from random import Random

from bench.builtin_model.corpus.items import Item, Message, assistant, city, facts, person, system, user, wording
from bench.builtin_model.corpus.phrases import exchange, expand, intents

_OPENING = "{Hey,|So,|Well,|Hi!|Hello!|Okay.|Oh,|Hey there.|Listen,|One more thing:|By the way,|Hm,|Now,|Alright.|Good day.|Dear friend,}"
_INTENTS = intents(
    """
    {Hi|Hello|Hey|Hello there|Hi there|Hey there|Hey you|Greetings|Good day|Howdy|Hello again|Hi again}{!|.|,| :)|}{ my friend| friend| everyone| you| computer| dear| little model| there|}{!|.|}
    {Hello hello|Hey hey|Hi hi}{!|}
    {Hi|Hello|Hey}, {is anybody there|anyone there|are you there|are you awake|can you hear me}?
    = Hello! *How can I help you*?
    = Hi! *What can I do for you*?

    {Good morning|Morning|A good morning|A very good morning}{ to you| my friend| dear| friend| everyone|}{!|.|}
    {Hello and good morning|Hi, good morning}{ to you|}{!|.}
    = *Good morning*! I hope you slept well.

    {Good evening|Evening|A good evening|Hello and good evening}{ to you| my friend| dear| friend|}{!|.|}
    = *Good evening*! How was your day?

    {Good night|Night night|Sleep well|Have a good night|I go to bed now|I am going to sleep|Time to sleep|I am off to bed}{ my friend| dear| then| now|}{!|.|}
    = *Good night*! Sleep well.

    {How are you|How are you doing|How do you do|How is it going|How do you feel|Are you well|How have you been|Are you doing well}{ today| now| this morning| my friend| these days| tonight|}?
    {What is up|What's up|How's life|How is life|How are things}{ today| with you| my friend|}?
    = I am fine, *thank you. How are you*?

    {I am|I'm|I feel|Today I am|Today I feel|I am feeling} {fine|good|great|happy|very happy|very well|wonderful|so happy|really good}{ today| now| this morning| right now|}{.|!|}
    {It is a {good|great|wonderful|beautiful} day|Life is good|Everything is {fine|great}|I had a {good|great|lovely} day}{ today| for me|}{.|!}
    = *I am glad to hear that*!
    = *That is good to hear*!

    {I am|I'm|I feel|Today I am|Today I feel|I am feeling} {{a bit|very|so|really|a little|quite|} {sad|unhappy|lonely|down|blue|bad}}{ today| now| tonight| right now|}{.|}
    {I had a {bad|sad|terrible|hard|awful} day|Nobody likes me|Everything went wrong|Nothing works}{ today| again|}{.|}
    = *I am sorry to hear that*. Do you want to talk about it?

    {I am|I'm|I feel|I am feeling} {{very|so|really|a bit|quite|} {tired|sleepy|exhausted|worn out}}{ today| now| this evening| right now| again|}{.|}
    {I need {a rest|a nap|more sleep|a break}|I did not sleep {well|enough|at all}}{ today| now| last night|}{.|}
    = Then *take a rest*. A little sleep helps.

    {I am|I'm|I feel|I am feeling} {{very|so|really|a bit|quite|} bored}{ today| now| right now| at home|}{.|}
    {There is nothing to do|I do not know what to do|What can I do when I am bored|Nothing happens}{ today| here| now|}{.|?}
    = Shall *I tell you a story or a joke*?

    {I am|I'm|I feel|I am getting} {{very|so|really|a bit|} {angry|mad|upset|furious}}{ today| now| at my {brother|sister|boss|friend|neighbour}| right now|}{.|!}
    = *Take a deep breath*. What happened?

    {I am|I'm|I feel|I am getting} {{very|so|really|a bit|} {hungry|starving}}{ now| today| already| again|}{.|!}
    {I want {something to eat|food|lunch|dinner}|It is time {for lunch|for dinner|to eat}}{ now|}{.|!}
    = Then *have something to eat*. Bread and cheese are never wrong.

    {I am|I'm|I feel} {{very|so|really|a bit|} {afraid|scared|nervous|worried}}{ today| now| of the dark| of tomorrow| about my exam|}{.|}
    = *You are not alone*. Tell me what worries you.

    {I am|I'm|I feel} {{very|so|really|a bit|} {sick|ill|unwell}}{ today| now|}{.|}
    {I have {a cold|a fever|a headache|the flu}|My {head|stomach|tooth|back} hurts}{ today| again| since yesterday|}{.|}
    = *Get well soon*! Please see a doctor if it does not get better.

    {Who are you|What are you|Tell me who you are|Please introduce yourself|Introduce yourself|Can you introduce yourself|Who am I talking to|Tell me about yourself|Tell me something about you|Who is there|Who is this|What kind of thing are you}{ exactly| then| please|}{?|.}
    {With whom am I {speaking|talking}|Whom do I {speak|talk} to}{ now| here|}?
    = *I am the built-in model of Tandem*, a very small language model.

    {What is your name|What's your name|Do you have a name|Tell me your name|How are you called|What do they call you|What should I call you|May I ask your name|Your name|How can I call you}{ please| then| by the way| anyway|}?
    = *You can call me Tandem*.

    {Are you {a robot|a machine|a computer|a program|human|a human|a person|real|alive|a man|a woman|an AI|an artificial intelligence|a language model|a bot}}{ or not| really| actually| then|}?
    = *I am a small language model*, a computer program that writes text.

    {How old are you|What is your age|When were you born|When is your birthday|Tell me your age|How long do you exist|When were you made}{ exactly| by the way| then| please|}?
    = *I have no age*. I was trained a short while ago.

    {Who made you|Who built you|Who trained you|Where do you come from|Where are you from|Who is your maker|Who created you|How were you made|What made you}{ then| exactly| and why| by the way|}?
    = *I was trained for the Tandem project*, on sentences made by a program.

    {What can you do|What are you able to do|How can you help me|What can you help me with|What do you know|What are you good at|Can you help me|I need help|Help|What can I ask you|What do you do|What are your skills|Show me what you can do}{ today| please| then| for me| exactly|}{?|.}
    = *I can tell stories, answer simple questions*, add and subtract, sort words, write JSON and call tools.

    {What can you not do|What are you bad at|What are your limits|What do you not know|Are you clever|Are you smart|How smart are you|How clever are you|Do you know everything|Can I trust you|Do you make mistakes|Are you always right}{ then| really| exactly| actually|}?
    = *I am very small and make mistakes*. For hard questions use a larger model.

    {Where are you|Where do you live|Where is your home|Where do you run|Where are you now|What is your address|On which machine do you run}{ exactly| right now| then| at the moment|}?
    = *I run on this computer*, in the workers of Tandem.

    {Do you {sleep|dream|eat|drink|get tired|breathe|have feelings|feel pain|have a body|have a heart|have eyes|have hands|get hungry|get bored}}{ too| at all| sometimes| at night| really| like me|}?
    = *No, I am only a program*.

    {Thanks|Thank you|Thank you very much|Thanks a lot|Many thanks|Thank you so much|Cheers|Thanks for {your help|the help|the answer|everything|that}|Thank you for {your help|the answer|everything|your time|that}|I thank you|That was {helpful|very helpful|kind of you}|You helped me{ a lot| very much|}}{ again| my friend| really| dear|}{!|.|}
    = *You are welcome*!

    {Bye|Goodbye|Bye bye|See you|See you later|See you soon|See you tomorrow|I have to go|I must go|I am leaving|Until next time|Farewell|Take care|Have a nice day|I need to leave|That is all|Ciao}{ now| then| for today| my friend| for now| dear|}{!|.|}
    = *Goodbye*! Have a nice day.

    {Sorry|I am sorry|I apologise|My mistake|Pardon me|Excuse me|Oh, sorry|Please forgive me|It was my fault}{ about that| for that| my friend| really| for the trouble| for being late|}{!|.|}
    = *No problem at all*.

    {You are|You're} {{very|so|really|such|} {nice|kind|great|funny|clever|sweet|wonderful|helpful|smart|cool|amazing}}{ today| to me| my friend|}{!|.|}
    {Well done|Good job|Great job|Nice work|Good work|That was great|Great answer|Nice answer|I like you{ very much| a lot|}|I love you{ so much| very much|}|You did well}{!|.|}
    = *Thank you, that is kind of you*!

    {You are|You're} {{very|so|really|} {stupid|dumb|silly|slow|boring|useless|bad|wrong|rude}}{ today| again| you know|}{!|.|}
    {That is {wrong|not right|nonsense|not true|a mistake}|I do not like you|I hate you|Bad answer|What nonsense}{ at all| you know| again|}{!|.|}
    = *I am sorry. I am small* and still try my best.

    {Tell me a joke|Do you know a joke|A joke, please|Make me laugh|Say something funny|Can you tell a joke|I want to hear a joke|Please tell me a joke|Give me a joke|Tell a joke|Do you know any jokes|Another joke|Tell me another joke|Be funny|One joke}{ please| now| about anything| for my friend| quickly| before I go|}{?|.|}
    = *Why did the book go to the doctor*? Because it hurt its back.
    = *What did the ocean say to the beach*? Nothing, it just waved.
    = *Why was the clock always tired*? Because it ran all day.

    {Sing a song|Can you sing|Sing something|Please sing for me|Sing me a song|Do you sing|Can you sing a song|I want to hear a song}{ please| now| for me| today|}{?|.|}
    = *La la la*, the wheels go round, two riders make a happy sound.

    {Do you like {music|books|cats|dogs|bread|rain|the sea|stories|football|people|games|flowers|tea|coffee|chocolate|winter|summer|animals|numbers|trains|bikes}}{ too| at all| a lot| very much|}?
    = *I like words best*. And you?

    {What is your favourite {colour|color|animal|food|book|song|number|day|season|word|city|game|place}|Do you have a favourite {colour|color|animal|food|book|song|number|day|season|word|city|game|place}|Which {colour|animal|food|book|number|word} do you like best}{ and why| by the way| then| of all|}?
    = *I have no favourite*, but I like to hear about yours.

    {What are you doing|What do you do all day|What are you up to|Are you busy|What have you done today|Do you have time}{ now| right now| at the moment| for me|}?
    = *I am talking with you*, and I like that.

    {Can we be friends|Will you be my friend|Are we friends|Do you want to be my friend|Let us be friends|Be my friend|Do you have friends|Am I your friend}{ please| now| then| forever| today|}{?|.}
    = *Yes, let us be friends*!

    {What is the meaning of life|What is the sense of life|Why are we here|What is love|What is happiness|Is there a god|What comes after death|What is art|What is beauty}{ really| in your opinion| for you| do you think|}?
    = *That is a big question*. I am too small to answer it.

    {What is the latest news|What happened in the world|Who won the game|Who is the president|What is in the news|Who won the election|What is the price of gold|Tell me the news|How are the stock markets}{ today| this week| yesterday| now| please|}?
    = *I have no news*. I cannot look into the world.

    {Which languages do you speak|Do you speak {German|French|Spanish|Italian|Chinese|Japanese|Latin}|Can you speak {German|French|Spanish|Italian|Chinese|Japanese|Latin}|What languages do you know|Do you know {German|French|Spanish|Italian}|Can you translate|Please answer in {German|French|Spanish}}{ too| as well| for me| at all|}{?|}
    = *I speak only English*, and only a little.

    {Write {code|a program|a poem|an essay|a letter|an email}|Can you {code|program|write code|write a poem|write a letter|write Python}|Write a {Python|Java} program|Fix my {code|program|bug}}{ for me| please| now| today|}{?|.|}
    = *That is too hard for me*. A larger model can help you.

    {Yes|Yeah|Yep|Sure|Of course|Okay|OK|Alright|Fine|Good|Right|Great|Cool|Nice|I see|Wonderful|Perfect|Interesting|Ah}{ then| thanks| my friend| indeed| I understand|}{.|!|}
    = *Good*! What else can I do for you?

    {No|Nope|Not really|No thanks|Never mind|Not now|Maybe later|Nothing|Rather not}{ thank you| today| my friend| really|}{.|!|}
    = *All right*. I am here if you need me.

    {What should I {cook|eat|have for dinner|have for lunch|make for breakfast}|What is a good {dinner|lunch|breakfast}|Give me an idea for {dinner|lunch|breakfast}|What can we eat}{ today| tonight| tomorrow| with friends|}{?|}
    = *How about soup with bread*? It is easy and warm.

    {It is {raining|snowing|cold|hot|windy|sunny|foggy}|The weather is {bad|nice|good|terrible|lovely}|What {nice|bad|lovely} weather}{ today| here| again| outside| this morning|}{.|!|}
    = *Every weather has its good side*. Enjoy your day!

    {Today is my birthday|It is my birthday|I have birthday|I turned {ten|twenty|thirty|forty|fifty}|My birthday is today}{ today| you know| finally|}{!|.|}
    = *Happy birthday*! I wish you a wonderful year.

    {I {passed|made} my exam|I won {the game|a prize|the race}|I got {a new job|the job|married|a dog|a cat}|I finished my {work|book|homework}|We have a new {baby|house|dog}}{ today| yesterday| finally| this week|}{!|.|}
    = *Congratulations! That is great* news.

    {Say something|Talk to me|Tell me something|Say anything|Let us talk|Let's talk|Let us chat|I want to talk|Can we talk|Start talking}{ please| a bit| now| nice| with me| for a while|}{.|?|}
    = *Gladly! What would you like* to talk about?
    """
)
_TOLD_NAME = (
    "My name is {n}.",
    "I am {n}.",
    "Hi, I am {n}.",
    "Hello! My name is {n}.",
    "I'm {n}, nice to meet you.",
    "You can call me {n}.",
    "They call me {n}.",
    "Hello, {n} here.",
)
_ASKED_NAME = (
    "What is my name?",
    "Do you remember my name?",
    "What's my name?",
    "Who am I?",
    "Do you still know my name?",
    "Tell me my name.",
    "How am I called?",
    "Can you say my name?",
)
_TOLD_PLACE = (
    "I live in {c}.",
    "I come from {c}.",
    "My home is {c}.",
    "I am from {c}.",
    "My city is {c}.",
    "I moved to {c}.",
)
_ASKED_PLACE = (
    "Where do I live?",
    "Where am I from?",
    "Which city do I live in?",
    "Do you remember where I live?",
    "What is my city?",
    "Where is my home?",
)
_NAMED_SYSTEM = (
    "Your name is {n}.",
    "You are {n}.",
    "You are {n}, a friendly assistant.",
    "You are called {n}. Be kind.",
    "You play {n}.",
    "Act as {n}.",
)
_NAMED_ASK = (
    "{Hi, |Hello! |Hey, |So, |Now, |}{what is your name|who are you|what's your name|tell me your name|what should I call you|do you have a name}"
    "{ please| then| by the way|}?"
)


def draw(rng: Random) -> Item:
    """Draw an item of this skill."""
    pick = rng.random()
    if pick < 0.06:
        return _named(rng)
    if pick < 0.2:
        return _remembered(rng)
    return exchange(rng, "smalltalk", rng.choice(_INTENTS), _OPENING)


def _named(rng: Random) -> Item:
    """Draw an item in which a system prompt gives the assistant a name."""
    name = person(rng)
    question = expand(rng, _NAMED_ASK)
    prompt = (system(rng.choice(_NAMED_SYSTEM).format(n=name)), user(question[0].upper() + question[1:]))
    return Item(
        "smalltalk",
        wording(f"{name} {question}"),
        (*prompt, assistant(f"My name is {name}.")),
        facts([rf"My name is {name}\."]),
    )


def _remembered(rng: Random) -> Item:
    """Draw an item that asks for a fact from the first turn, with other turns in between."""
    between: list[Message] = []
    while rng.random() < 0.4 and len(between) < 6:
        between += exchange(rng, "smalltalk", rng.choice(_INTENTS)).messages
    if rng.random() < 0.65:
        what = person(rng)
        told, reply = rng.choice(_TOLD_NAME).format(n=what), f"Nice to meet you, {what}!"
        asked, answer = rng.choice(_ASKED_NAME), f"Your name is {what}."
    else:
        what = city(rng)
        told, reply = rng.choice(_TOLD_PLACE).format(c=what), f"{what} sounds nice."
        asked, answer = rng.choice(_ASKED_PLACE), f"You live in {what}."
    messages = (user(told), assistant(reply), *between, user(asked), assistant(answer))
    return Item("smalltalk", wording(f"{told} {asked}"), messages, facts([re.escape(answer).replace("\\ ", " ")]))
