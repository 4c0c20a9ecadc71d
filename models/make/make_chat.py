"""Write models/prompts/chat.jsonl: 80 questions to a chat model, ten of each of eight categories.

    python models/make/make_chat.py

Written for this project, under its licence. Never chosen by how well their answers draft.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

PROMPTS = Path(__file__).resolve().parents[2] / "models" / "prompts"
QUESTIONS = {
    "writing": [
        "Write a short email to my neighbours announcing that I will be renovating my kitchen for three weeks, with "
        "drilling only between nine and noon. Keep it friendly and apologise for the noise.",
        "Describe a lighthouse during a winter storm in two paragraphs, without using the words sea, wave or wind.",
        "Write a product description for a wooden desk that folds flat against the wall. It is meant for small flats.",
        "Compose a poem of four stanzas about the last bus of the night.",
        "Draft a letter of recommendation for a student who was quiet in class but led the robotics club for "
        "two years.",
        "Write the opening of a detective story that is set in a public library and begins with a returned book.",
        "I have to give a two-minute toast at my sister's wedding. She is a nurse and he bakes bread. Write it.",
        "Write a persuasive article of about 200 words on why towns should plant more fruit trees along their streets.",
        "Turn these notes into a polite refusal: cannot come on the 14th, child is ill, happy to present in "
        "May, slides "
        "are ready.",
        "Write a review of an imaginary film about a retired clockmaker who is asked to repair a spaceship.",
    ],
    "roleplay": [
        "You are the captain of a cargo ship in 1890. A passenger asks why the journey takes so long. Answer in "
        "character.",
        "Pretend to be a patient piano teacher. I have just told you that I did not practise all week.",
        "Act as a museum guide in front of a stone axe that is half a million years old and explain it to a "
        "school class.",
        "You are a weather forecaster who has to announce snow in July. Give your report.",
        "Play the part of an interviewer for a job as a zookeeper. Ask me five questions, one after the other, and say "
        "what a good answer to each would contain.",
        "You are an old oak tree in a city park. Tell me what has changed around you in two hundred years.",
        "Pretend that you are a medieval merchant who sells spices. Persuade me to buy pepper.",
        "Act as a personal trainer. I am sixty, have a bad knee, and want to run five kilometres next summer.",
        "You are the ship's computer of a spacecraft and have to wake the crew to tell them that you took a "
        "wrong turn.",
        "Play a tired chef who explains to a new waiter why the soup must never be sent back.",
    ],
    "reasoning": [
        "Anna is older than Ben, and Ben is older than Carla. Dora is younger than Carla. Who is the second oldest? "
        "Explain each step.",
        "A shop says that everything is half price, and then takes another half off at the till. Is that free? "
        "Why not?",
        "If all roses are flowers and some flowers fade quickly, does it follow that some roses fade quickly?",
        "I left home at 8:10, walked for 25 minutes, waited 12 minutes for a train and travelled for 48 minutes. When "
        "did I arrive?",
        "There are three boxes labelled apples, pears and both. All labels are wrong. From which box should I take one "
        "fruit to find out what is in all of them?",
        "Which is the odd one out: violin, trumpet, cello, guitar? Give two different answers with a reason for each.",
        "A town has two barbers. One has a neat haircut and the other a terrible one. To which of them should I go?",
        "Yesterday it rained and the match was cancelled. Does that mean that the match was cancelled because "
        "it rained? "
        "What else could be the case?",
        "I can see a clock in a mirror, and it seems to show twenty past four. What time is it?",
        "Two trains leave the same station in opposite directions, one at 60 and one at 90 kilometres an hour. How far "
        "apart are they after 40 minutes, and what did you assume?",
    ],
    "math": [
        "What is 17% of 350? Show how to work it out in the head.",
        "Solve the equation 3x - 7 = 2x + 11 and check the answer.",
        "A rectangle is 4 cm longer than it is wide, and its area is 96 square centimetres. How long are its sides?",
        "Explain why the sum of two odd numbers is always even.",
        "How many different ways are there to arrange the letters of the word LEVEL?",
        "I roll two dice. What is the probability that the sum is 9 or more?",
        "Write 0.125 as a fraction in its lowest terms and explain the steps.",
        "What is the derivative of x^3 - 5x + 2, and where is it zero?",
        "A recipe for 4 people needs 300 g of flour and 2 eggs. How much do I need for 10 people?",
        "The numbers 2, 6, 12, 20, 30 follow a rule. What are the next two, and what is the formula?",
    ],
    "coding": [
        "Write a Python function that returns the words of a text that occur more than once, in alphabetical order.",
        "What is the difference between a list and a tuple in Python? Give an example where it matters.",
        "Write a SQL query that lists the three customers with the highest total of orders in 2025. The tables are "
        "customers(id, name) and orders(customer_id, total, day).",
        "This loop never ends. Why?\n\n```python\ni = 0\nwhile i < 10:\n    print(i)\n```",
        "Write a shell command that counts the lines of all files ending in .txt below the current directory.",
        "Explain what recursion is, with a function that computes the factorial of a number.",
        "Write a class `Stack` in Python with push, pop and peek, and raise an error where the stack is empty.",
        "How do I undo the last commit in git without losing my changes?",
        "Write a JavaScript function that checks whether a string reads the same from both ends, ignoring spaces.",
        "Rewrite this so that it is easier to read:\n\n```python\ndef f(a):\n    r = []\n    for i in range(len(a)):\n"
        "        if a[i] % 2 == 0:\n            r.append(a[i] * a[i])\n    return r\n```",
    ],
    "extraction": [
        "List every date in this text: The bridge was planned on 3 March 1931, opened on 19 May 1934, and closed for "
        "repairs from 2 June to 30 August 1978.",
        "Extract name, phone number and appointment as JSON: Hello, this is Maria Keller, I would like to move my "
        "appointment from Monday to Thursday at 10:30. You can reach me at 555 0142.",
        "Is this review positive, negative or mixed? Answer in one word, then explain: The room was spotless and the "
        "view superb, but we waited forty minutes for breakfast.",
        "Summarise in one sentence: The council met for five hours. After a long debate about parking it agreed "
        "to widen "
        "the cycle path along the river, to be paid for by the sale of the old fire station.",
        "Make a table with the columns animal, weight and food from this: A badger weighs about 12 kg and eats mostly "
        "earthworms. The red fox, at 6 kg, prefers mice. A hedgehog weighs 1 kg and looks for beetles.",
        "Which of these are cities and which are countries? Lima, Kenya, Oslo, Peru, Nairobi, Norway, Quito, Chad.",
        "Find the errors of spelling in this sentence and correct them: The goverment anounced a seperate comittee for "
        "the enviroment.",
        "Extract all amounts of money and add them up: We paid 120 euros for the flights, 45 for the train, 310 "
        "for the "
        "hotel and 62.50 for dinner.",
        "Who did what? Answer as a list: After Tom had washed the dishes, Ines dried them while Paul was asleep on the "
        "sofa. Later Tom woke him.",
        "Sort these tasks into urgent and not urgent: water pipe is leaking; order new pens; server room is at 45 "
        "degrees; plan the summer party; client waits for a reply since last week.",
    ],
    "stem": [
        "Why is the sky blue during the day and red in the evening?",
        "How does a refrigerator move heat from a cold place to a warm one?",
        "Explain photosynthesis to a child of ten.",
        "What is the difference between a virus and a bacterium, and why do antibiotics work against only one of them?",
        "Why does ice float on water, and what would be different in lakes if it did not?",
        "How do vaccines prepare the immune system?",
        "What happens inside a star when it has used up its hydrogen?",
        "Explain how a transistor can work as a switch, and why that is enough to build a computer.",
        "What causes the tides, and why are there usually two high tides a day?",
        "How can scientists tell how old a rock is?",
    ],
    "humanities": [
        "What were the main causes of the French Revolution?",
        "Compare the philosophies of Plato and Aristotle on what is real.",
        "Why did the Roman Empire build so many roads?",
        "What is the difference between a metaphor and a simile? Give three examples of each.",
        "How did the printing press change Europe?",
        "Explain what inflation is and whom it hurts most.",
        "Should voting be compulsory? Give the strongest argument for each side.",
        "What makes a piece of music sound sad?",
        "Describe how the Silk Road connected cultures, with two examples of ideas that travelled along it.",
        "What did the Industrial Revolution mean for the daily life of a family of weavers?",
    ],
}


def conversations() -> list[dict[str, object]]:
    """Return a conversation of one question a line; the categories take turns, so that any first ones hold all."""
    turns = zip(*([(name, text) for text in texts] for name, texts in QUESTIONS.items()), strict=True)
    return [
        {"messages": [{"role": "user", "content": text}], "category": name} for turn in turns for name, text in turn
    ]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    path = PROMPTS / "chat.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in conversations()), encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
