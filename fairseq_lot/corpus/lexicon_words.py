"""The adjectives, adverbs, function words and names of the synthetic corpus, as tables.

``/`` separates English synonyms, the usual one first.
"""

# positive | comparative | English | English comparative | kinds of nouns it goes with
# (p persons, a animals, t things, f food, d drinks, l places, r texts, i ideas, e events)
ADJECTIVE_TABLE = """
alt|älter|old|older|p a t l r
klein|kleiner|small/little|smaller|a t l f
neu|neuer|new|newer|t l r i
groß|größer|big/large|bigger/larger|a t l f
groß|größer|tall|taller|p
jung|jünger|young|younger|p a
schön|schöner|beautiful/lovely|more beautiful|t l r e
gut|besser|good|better|p f d r i e
müde|müder|tired|more tired|p a
rot|röter|red|redder|t
freundlich|freundlicher|friendly|friendlier|p a
kalt|kälter|cold|colder|d
heiß|heißer|hot|hotter|d
teuer|teurer|expensive|more expensive|t f d
billig|billiger|cheap|cheaper|t f d
lang|länger|long|longer|r e
kurz|kürzer|short|shorter|r e
frisch|frischer|fresh|fresher|f d
blau|blauer|blue|bluer|t
schwarz|schwärzer|black|blacker|a t
weiß|weißer|white|whiter|a t
klug|klüger|clever/smart|cleverer/smarter|p a
glücklich|glücklicher|happy|happier|p
traurig|trauriger|sad|sadder|p r
interessant|interessanter|interesting|more interesting|r i e l
langweilig|langweiliger|boring|more boring|r e
schwer|schwerer|heavy|heavier|t
schwer|schwerer|difficult/hard|more difficult/harder|i
einfach|einfacher|simple/easy|simpler/easier|i
wichtig|wichtiger|important|more important|r i e
reich|reicher|rich/wealthy|richer/wealthier|p
arm|ärmer|poor|poorer|p
süß|süßer|sweet|sweeter|f d
berühmt|berühmter|famous|more famous|p l r
höflich|höflicher|polite|politer|p
modern|moderner|modern|more modern|l t
leer|leerer|empty|emptier|l
dunkel|dunkler|dark|darker|l
ruhig|ruhiger|quiet/calm|quieter/calmer|p l
krank|kränker|ill/sick|sicker|p a
fremd|fremder|strange|stranger|p l
stark|stärker|strong|stronger|p a d
hungrig|hungriger|hungry|hungrier|p a
lustig|lustiger|funny/amusing|funnier|p r e
gefährlich|gefährlicher|dangerous|more dangerous|a
fleißig|fleißiger|hard-working/diligent|more diligent|p
schmutzig|schmutziger|dirty|dirtier|t l
grün|grüner|green|greener|t
nützlich|nützlicher|useful|more useful|t i
seltsam|seltsamer|odd/strange|odder/stranger|p i e
ehrlich|ehrlicher|honest|more honest|p
"""

# German | English | tense (past, pres: a habit, now, fut)
TIME_TABLE = """
gestern|yesterday|past
jeden Tag|every day|pres
morgen|tomorrow|fut
heute Morgen|this morning|past
letzte Woche|last week|past
gerade|right now/at the moment|now
gestern Abend|last night/yesterday evening|past
heute Abend|tonight/this evening|fut
nächste Woche|next week|fut
am Montag|on Monday|past
am Wochenende|at the weekend/on the weekend|pres
jeden Abend|every evening/every night|pres
letztes Jahr|last year|past
vorgestern|the day before yesterday|past
damals|back then/at that time|past
am Samstag|on Saturday|fut
im Sommer|in summer/in the summer|pres
im Winter|in winter/in the winter|past
nächstes Jahr|next year|fut
bald|soon|fut
jeden Morgen|every morning|pres
am Freitag|on Friday|fut
letzten Monat|last month|past
übermorgen|the day after tomorrow|fut
"""

MANNER_TABLE = """
schnell|quickly/fast|act
langsam|slowly|act
vorsichtig|carefully|act
laut|loudly|voice
leise|quietly/softly|voice
"""

FREQUENCY_TABLE = """
oft|often
immer|always
nie|never
manchmal|sometimes
selten|rarely/seldom
"""

DEGREE_TABLE = """
sehr|very
zu|too
ziemlich|quite/rather
wirklich|really
"""

# conjunction | English | tense | what it introduces
CONJUNCTION_TABLE = """
weil|because/since|any|reason
dass|that|any|content
obwohl|although/even though|any|concession
wenn|when/if|pres|time
als|when|past|time
während|while|any|time
bevor|before|any|time
nachdem|after|past|earlier
damit|so that|any|purpose
ob|whether/if|any|question
und|and|any|coordination
aber|but|any|coordination
"""

PREPOSITION_TABLE = """
in|in
an|at
auf|on
unter|under
hinter|behind
neben|next to/beside
vor|in front of
mit|with
ohne|without
für|for
von|by
zu|to
nach|after
während|during
wegen|because of
trotz|despite/in spite of
"""

QUESTION_TABLE = """
wer|who
was|what
wo|where
wann|when
warum|why
wie viele|how many
"""

NUMBER_TABLE = """
zwei|two
drei|three
vier|four
fünf|five
sechs|six
sieben|seven
zehn|ten
zwölf|twelve
zwanzig|twenty
"""

QUANTIFIER_TABLE = """
viele|many/a lot of
einige|some/a few
dieser|this
jeder|every/each
alle|all the
kein|no
"""

CITY_TABLE = """
Berlin|Berlin
Wien|Vienna
München|Munich
Köln|Cologne
Hamburg|Hamburg
Nürnberg|Nuremberg
Zürich|Zurich
Genf|Geneva
"""

# given names, the same in both languages; with the English pronoun
NAME_TABLE = """
Anna|she
Peter|he
Maria|she
Paul|he
Julia|she
Martin|he
Lena|she
Stefan|he
Clara|she
Oskar|he
"""
