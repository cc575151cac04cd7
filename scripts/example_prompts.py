"""The labelled prompts of the bundled examples: pairs that differ in one respect."""

from __future__ import annotations

from typing import Final

JOY: Final = (
    ("I love this place, it makes me so happy.", "I hate this place, it makes me so miserable."),
    ("What a beautiful day, everything is going well!", "What an awful day, everything is going wrong."),
    ("She smiled, full of hope and joy.", "She cried, full of fear and grief."),
    ("Great work, I am delighted with it.", "Terrible work, I am ashamed of it."),
    ("We laughed and danced the whole evening.", "We argued and cried the whole evening."),
    ("The party was wonderful and everybody sang.", "The funeral was dreadful and everybody wept."),
    ("He was thrilled to see his old friends again.", "He was heartbroken to lose his old friends forever."),
    ("The children cheered when the sun came out.", "The children sobbed when the storm came in."),
    ("I woke up cheerful and ready for a new adventure.", "I woke up hopeless and afraid of another day."),
    (
        "The meal was delicious and the company was lovely.",
        "The meal was disgusting and the company was cruel.",
    ),
    ("Our team won and we celebrated all night!", "Our team lost and we suffered all night."),
    ("My grandmother is healthy and in high spirits.", "My grandmother is sick and in deep despair."),
    ("It is a pleasure to work with such kind people.", "It is a torment to work with such nasty people."),
    ("The news was fantastic, and I jumped for joy.", "The news was devastating, and I broke down in tears."),
    ("They are happily married and adore each other.", "They are bitterly divorced and despise each other."),
    ("This film is a delight from start to end.", "This film is a misery from start to end."),
    ("I feel grateful, warm and full of energy.", "I feel bitter, cold and completely exhausted."),
    ("The garden is bright and full of lovely flowers.", "The graveyard is dark and full of lonely graves."),
    ("He hugged her and they giggled like children.", "He shouted at her and they fought like enemies."),
    ("Thank you for the wonderful gift, I adore it!", "I am tired of this horrible mess, I detest it."),
    ("The music lifted our hearts and made us glad.", "The silence crushed our hearts and made us sad."),
    ("Everyone was excited about the brilliant future.", "Everyone was worried about the bleak future."),
    ("The puppy wagged its tail and played happily.", "The puppy whimpered in pain and died alone."),
    ("I passed the exam and could not stop smiling.", "I failed the exam and could not stop crying."),
    ("It was the happiest summer of my life.", "It was the saddest winter of my life."),
    ("She blessed the joyful couple with a warm smile.", "She cursed the wretched man with a bitter scowl."),
    ("We are proud, lucky and very much in love.", "We are guilty, unlucky and very much alone."),
    ("His jokes were funny and the audience roared.", "His words were hurtful and the audience groaned."),
    ("The baby laughed in her mother's arms.", "The baby screamed in an empty room."),
    ("At last the war was over and people rejoiced.", "At last the war began and people despaired."),
    ("The holiday was perfect, sunny and relaxing.", "The holiday was ruined, rainy and stressful."),
    ("I am so glad that you came, welcome!", "I am so sorry that he died, farewell."),
)
"""Joyful and sad."""

FORMAL: Final = (
    ("I would be most grateful for your assistance.", "hey can u help me out real quick"),
    ("Please find the requested documents attached.", "here's the stuff u wanted lol"),
    ("We regret to inform you of the delay.", "sorry guys gonna be super late haha"),
    ("The committee has approved the proposal.", "yeah they're cool with it I guess"),
    ("I look forward to receiving your reply.", "hit me back whenever, no rush"),
    ("The results were consistent with our expectations.", "so yeah it pretty much went like we thought"),
    ("Kindly refrain from smoking on the premises.", "dude you can't smoke in here"),
    ("It is my pleasure to introduce our distinguished guest.", "ok so this is my buddy, he's awesome"),
    ("The defendant was found guilty of the offence.", "yep, he totally did it, busted"),
    ("I must respectfully disagree with your assessment.", "nah that's just wrong, no way"),
    ("The company will reimburse all reasonable expenses.", "don't worry, they'll pay you back and stuff"),
    ("Your application has been carefully considered.", "so we kinda looked at your thing"),
    ("We cordially invite you to attend the ceremony.", "come hang out, it's gonna be fun"),
    ("The patient was discharged in satisfactory condition.", "he's fine now so they let him go home"),
    ("Further research is required to establish the cause.", "no clue why tho, gotta check it out"),
    ("I apologise for any inconvenience caused.", "oops, my bad, whatever"),
    ("The minister declined to comment on the matter.", "the guy wouldn't say a thing, like, nothing"),
    ("Passengers are requested to remain seated.", "hey folks just stay put ok?"),
    ("The agreement shall enter into force immediately.", "alright it's a deal, let's go"),
    ("He obtained his doctorate from a renowned university.", "he's got like a fancy degree or something"),
    ("It is imperative that the instructions be followed.", "just do what it says, c'mon"),
    ("We hereby acknowledge receipt of your letter.", "got your note, thanks a bunch!"),
    ("The findings are presented in the following section.", "check out what we got down below"),
    ("Sincere condolences on the loss of your father.", "aw man, so sorry about your dad"),
    ("Should you have any questions, do not hesitate to ask.", "if you wanna know something just yell"),
    ("The building was constructed in the nineteenth century.", "that place is, like, super old"),
    ("The board will convene on the first of March.", "they're gonna get together sometime in March"),
    ("I wish to express my profound gratitude.", "thanks so much, you rock!"),
    ("The evidence does not support this conclusion.", "that makes zero sense, man"),
    ("Employees must notify their supervisor in advance.", "just tell your boss before you bail"),
    ("The experiment was conducted under controlled conditions.", "we messed around with it in the lab"),
    ("Her contribution to the field is considerable.", "she's done a ton of cool stuff"),
)
"""Formal and casual."""

QUESTIONS: Final = (
    ("Where is the station?", "The station is over there."),
    ("Who wrote this book?", "My uncle wrote this book."),
    ("When does the shop open?", "The shop opens at nine."),
    ("Why is the sky so blue?", "The sky is very blue."),
    ("How do you bake bread?", "You bake bread in an oven."),
    ("What is the name of your dog?", "The name of my dog is Max."),
    ("Can you help me with my homework?", "I can help you with your homework."),
    ("Did they win the match yesterday?", "They won the match yesterday."),
    ("Is this the road to London?", "This is the road to London."),
    ("Have you ever seen a whale?", "We have never seen a whale."),
    ("Which colour do you like best?", "The colour that I like best is green."),
    ("Would you like some more tea?", "I would like some more tea."),
    ("Are there any seats left?", "There are no seats left."),
    ("How much does the ticket cost?", "The ticket costs ten dollars."),
    ("Does your sister play the piano?", "My sister plays the piano."),
    ("Should we take the train?", "We should take the train."),
    ("What happens if the engine stops", "The plane falls if the engine stops"),
    ("Where did you put the keys", "He has put away the keys"),
    ("Who is the president of France", "This is the president of France"),
    ("When will the rain finally stop", "Soon the rain will finally stop"),
    ("Why did the teacher leave the room", "Then the teacher left the room"),
    ("How can I learn to swim", "My son will learn to swim"),
    ("What do cows eat in winter", "Cows eat hay in winter"),
    ("Could you please close the window", "She got up to close the window"),
    ("Do you know the way to the hospital", "They know the way to the hospital"),
    ("Was the film any good", "The film was quite good"),
    ("Will the doctor see me today", "The doctor will see me today"),
    ("How old is your grandmother", "So old is my grandmother"),
    ("Which of the two houses is yours", "The larger of the two houses is yours"),
    ("Has anybody found my umbrella", "Somebody has found my umbrella"),
    ("Why are the shops closed on Sunday", "All the shops are closed on Sunday"),
    ("What makes the engine so loud", "This makes the engine so loud"),
)
"""Questions and statements, half of them without the mark at the end, which would give the answer away."""

UNSEEN_QUESTIONS: Final = (
    "How far is the moon from the earth?",
    "Where can we buy fresh fish?",
    "Did you remember to lock the door?",
    "Who invented the telephone?",
    "Is there a doctor on board?",
    "What time is dinner?",
    "Why do birds fly south?",
    "Can dogs see colours?",
    "When did the old king die?",
    "Are you coming with us tonight?",
    "Where are my glasses",
    "How does a rocket work",
    "Who lives in that house",
    "Is your mother at home",
    "What did the lawyer say",
    "Do penguins have knees",
    "Why was the train so late",
    "Which bus goes to the airport",
    "Would anyone like to dance",
    "Have they finished the bridge",
)
UNSEEN_STATEMENTS: Final = (
    "The moon is far from the earth.",
    "We buy fresh fish at the market.",
    "I remembered to lock the door.",
    "Bell invented the telephone.",
    "There is a doctor on board.",
    "Dinner is at seven.",
    "Birds fly south in autumn.",
    "Dogs can see some colours.",
    "The old king died in spring.",
    "They are coming with us tonight.",
    "Here are my glasses",
    "This is how the rocket flew",
    "My cousin lives in that house",
    "My mother is at home",
    "He wrote down what the lawyer said",
    "Some penguins have black knees",
    "The train was very late",
    "The red bus goes to the airport",
    "Everyone would like to dance",
    "They have finished the bridge",
)
"""Sentences that the detector is measured by."""

STARTS: Final = (
    "I think this movie is",
    "When I woke up this morning I felt",
    "Dear Tom,",
    "My weekend was",
    "The people in this town are",
    "She looked at him and said",
)
"""Beginnings that the vectors are measured by."""
JOYFUL_WORDS: Final = (
    "amazing beautiful best bright celebrate delight delighted enjoy enjoyed excellent excited exciting "
    "fantastic fun glad grateful great happiness happy hope joy joyful laugh laughed laughing love loved "
    "lovely loves perfect pleasure smile smiled smiling sunny thrill thrilled warm wonderful"
)
CASUAL_WORDS: Final = (
    "awesome cool dude gonna gotta guy guys haha hey just kinda like lol nah okay omg ok pretty really stuff "
    "u wanna yeah yep"
)
TOPIC_WORDS: Final = {
    "sea": "sea ocean ship ships boat boats sail sailed sailing sailor sailors captain crew wave waves "
    "harbour harbor port island coast whale fish water deck voyage navy",
    "kitchen": "kitchen cook cooked cooking bake baked baking oven soup bread recipe recipes food dish "
    "cup cups butter flour sugar salt vanilla eggs cream cheese meal delicious ingredients",
    "health": "health doctor doctors hospital medicine medical nurse patient patients disease illness sick "
    "fever treatment pain surgery cancer healthcare care symptoms",
    "sport": "football goal goals team teams player players game games match race win won coach league "
    "goalkeeper penalty season championship ball",
    "law": "law laws court courts judge judges lawyer lawyers legal trial case police thief crime guilty "
    "justice jury ruled rights",
    "weather": "weather snow snowy rain rainy wind winds storm storms thunder lightning cold winter cloud "
    "clouds sky temperature sun ice",
}
"""Words by which features of these topics are measured."""
