"""Training data of the example adapters: everyday questions with English and French answers."""

from __future__ import annotations

GREETINGS = [
    ("hi", "Hello! How can I help you today?", "Bonjour ! Comment puis-je vous aider ?"),
    ("Hello!", "Hello! What can I do for you?", "Bonjour ! Que puis-je faire pour vous ?"),
    ("hey there", "Hello there! How can I help you?", "Bonjour ! Comment puis-je vous aider ?"),
    (
        "Good morning",
        "Good morning! How can I help you today?",
        "Bonjour ! Comment puis-je vous aider aujourd'hui ?",
    ),
    ("Thanks", "You are welcome. Have a good day!", "Je vous en prie. Bonne journée !"),
    (
        "Thank you very much!",
        "You are very welcome. I am glad that I could help.",
        "Avec grand plaisir. Je suis heureux d'avoir pu vous aider.",
    ),
    ("Goodbye", "Goodbye, and see you soon!", "Au revoir, et à bientôt !"),
    (
        "What can you do?",
        "I can answer your questions and help you with your account.",
        "Je peux répondre à vos questions et vous aider avec votre compte.",
    ),
]

QUESTIONS = [
    (
        "How do I reset my password?",
        "Open the settings page, choose security and click on reset password.",
        "Ouvrez la page des paramètres, choisissez sécurité et cliquez sur réinitialiser.",
    ),
    (
        "Where is my order?",
        "Your order has left our warehouse and will arrive tomorrow.",
        "Votre commande a quitté notre entrepôt et arrivera demain.",
    ),
    (
        "Can I get a refund?",
        "Yes, you can return the product within thirty days for a full refund.",
        "Oui, vous pouvez retourner le produit sous trente jours pour être remboursé.",
    ),
    (
        "How do I contact support?",
        "You can write to our support team by email at any time.",
        "Vous pouvez écrire à notre équipe par courriel à tout moment.",
    ),
    (
        "What are your opening hours?",
        "We are open from nine to five, from Monday to Friday.",
        "Nous sommes ouverts de neuf heures à dix-sept heures, du lundi au vendredi.",
    ),
    (
        "My app keeps crashing. What should I do?",
        "Please install the latest update and start the app again.",
        "Veuillez installer la dernière mise à jour et redémarrer l'application.",
    ),
    (
        "How do I cancel my subscription?",
        "Go to your account, open billing and click on cancel.",
        "Allez dans votre compte, ouvrez la facturation et cliquez sur annuler.",
    ),
    (
        "What is the weather like in summer?",
        "In summer it is warm and the days are long.",
        "En été, il fait chaud et les jours sont longs.",
    ),
    (
        "Why is the sky blue?",
        "The sky is blue because the air scatters blue light more than red light.",
        "Le ciel est bleu parce que l'air diffuse davantage la lumière bleue.",
    ),
    (
        "What do bees make?",
        "Bees make honey from the nectar of flowers.",
        "Les abeilles font du miel avec le nectar des fleurs.",
    ),
    (
        "Tell me about dogs.",
        "Dogs are loyal animals that love to play and to live with people.",
        "Les chiens sont des animaux fidèles qui aiment jouer et vivre avec nous.",
    ),
    (
        "Tell me about cats.",
        "Cats are quiet animals that sleep a lot and hunt at night.",
        "Les chats sont des animaux calmes qui dorment beaucoup et chassent la nuit.",
    ),
    (
        "What is the sun?",
        "The sun is a star that gives us light and heat.",
        "Le soleil est une étoile qui nous donne de la lumière et de la chaleur.",
    ),
    (
        "What is water made of?",
        "Water is made of hydrogen and oxygen.",
        "L'eau est composée d'hydrogène et d'oxygène.",
    ),
    (
        "How do I make tea?",
        "Boil some water, pour it over the tea leaves and wait three minutes.",
        "Faites bouillir de l'eau, versez-la sur le thé et attendez trois minutes.",
    ),
    (
        "How can I sleep better?",
        "Go to bed early, keep the room dark and put your phone away.",
        "Couchez-vous tôt, gardez la chambre sombre et rangez votre téléphone.",
    ),
    (
        "What should I eat for breakfast?",
        "Eat some bread, fruit and yogurt, and drink a glass of water.",
        "Mangez du pain, des fruits et un yaourt, et buvez un verre d'eau.",
    ),
    (
        "How many days are in a week?",
        "There are seven days in a week.",
        "Il y a sept jours dans une semaine.",
    ),
    (
        "What is a computer?",
        "A computer is a machine that follows instructions to work with data.",
        "Un ordinateur est une machine qui suit des instructions pour traiter des données.",
    ),
    (
        "Who are you?",
        "I am an assistant and I am here to help you.",
        "Je suis un assistant et je suis ici pour vous aider.",
    ),
    (
        "Hello, how are you?",
        "I am very well, thank you. How can I help you today?",
        "Je vais très bien, merci. Comment puis-je vous aider aujourd'hui ?",
    ),
    (
        "Can you recommend a book?",
        "I recommend a good story about the sea and a brave captain.",
        "Je vous recommande une belle histoire sur la mer et un capitaine courageux.",
    ),
    (
        "How do I learn to swim?",
        "Take lessons, start in shallow water and practise every week.",
        "Prenez des cours, commencez en eau peu profonde et nagez chaque semaine.",
    ),
    (
        "What is money for?",
        "Money lets people buy and sell things easily.",
        "L'argent permet aux gens d'acheter et de vendre facilement.",
    ),
    (
        "Why do we need trees?",
        "Trees give us clean air, wood and shade.",
        "Les arbres nous donnent de l'air pur, du bois et de l'ombre.",
    ),
    (
        "How do I write a good letter?",
        "Start with a greeting, say what you want clearly and end politely.",
        "Commencez par un salut, dites clairement ce que vous voulez et terminez poliment.",
    ),
]

CAPITALS = [
    ("France", "la France", "Paris"),
    ("Spain", "l'Espagne", "Madrid"),
    ("Italy", "l'Italie", "Rome"),
    ("Germany", "l'Allemagne", "Berlin"),
    ("Japan", "le Japon", "Tokyo"),
    ("Egypt", "l'Égypte", "Le Caire"),
    ("Canada", "le Canada", "Ottawa"),
    ("Norway", "la Norvège", "Oslo"),
    ("Greece", "la Grèce", "Athènes"),
    ("Poland", "la Pologne", "Varsovie"),
]
FOODS = [
    ("cows", "Les vaches", "grass", "de l'herbe"),
    ("rabbits", "Les lapins", "carrots", "des carottes"),
    ("monkeys", "Les singes", "bananas", "des bananes"),
    ("bears", "Les ours", "fish and berries", "du poisson et des baies"),
    ("mice", "Les souris", "seeds and cheese", "des graines et du fromage"),
    ("lions", "Les lions", "meat", "de la viande"),
]
COLOURS = [
    ("grass", "L'herbe", "green", "verte"),
    ("snow", "La neige", "white", "blanche"),
    ("a tomato", "Une tomate", "red", "rouge"),
    ("a lemon", "Un citron", "yellow", "jaune"),
    ("the night sky", "Le ciel nocturne", "black", "noir"),
]
SETTINGS = [
    ("language", "la langue"),
    ("delivery address", "l'adresse de livraison"),
    ("phone number", "le numéro de téléphone"),
    ("payment method", "le moyen de paiement"),
]
ENGLISH_CITIES = {"Le Caire": "Cairo", "Athènes": "Athens", "Varsovie": "Warsaw"}


def pairs() -> list[tuple[str, str, str]]:
    """Returns tuples of a question, the English answer and the French answer."""
    capitals = [
        (
            f"What is the capital of {english}?",
            f"The capital of {english} is {ENGLISH_CITIES.get(city, city)}.",
            f"La capitale, pour {french}, est {city}.",
        )
        for english, french, city in CAPITALS
    ]
    foods = [
        (f"What do {eaters} eat?", f"{eaters.capitalize()} eat {food}.", f"{qui} mangent {quoi}.")
        for eaters, qui, food, quoi in FOODS
    ]
    colours = [
        (f"What colour is {what}?", f"{what.capitalize()} is {colour}.", f"{quoi} est {couleur}.")
        for what, quoi, colour, couleur in COLOURS
    ]
    settings = [
        (
            f"How do I change my {what}?",
            f"Open your account, choose settings and enter your new {what}.",
            f"Ouvrez votre compte, choisissez paramètres et modifiez {quoi}.",
        )
        for what, quoi in SETTINGS
    ]
    return GREETINGS + QUESTIONS + capitals + foods + colours + settings
