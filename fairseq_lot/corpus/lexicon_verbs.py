"""The verbs of the synthetic corpus.

One line per verb: infinitive (``auf+machen`` is separable) | third person singular, past, participle where they are
not regular | auxiliary (h haben, s sein) | English, the usual word first (``turn +off``: the particle may follow the
object) | classes of the subject | frame | flags.

Frames: ``-`` no object; ``acc:…``, ``dat:…`` one object of these classes; ``auf acc:…`` an object with a preposition
(the English one belongs to the English verb); ``give:…`` a dative person and an accusative; ``put`` and ``lie`` an
object moved onto, or lying on, furniture; ``go`` a direction; ``live`` a workplace or place; ``sit`` a seat;
``play`` an instrument without article; ``dass``, ``ob``, ``zu`` a clause.
Flags: ``state`` no progressive, manner or place; ``act``, ``voice`` the manner adverbs that fit; ``refl`` reflexive;
``swap`` the German dative is the English subject; ``pass`` allows the passive.
"""

VERBS = """
sehen|sieht|sah|gesehen|h|see|person animal|acc:person animal vehicle plant|state
kaufen||||h|buy/purchase|person|acc:food drink read small cloth vehicle furniture|pass
suchen||||h|look for/search for|person|acc:small animal person cloth|
lesen|liest|las|gelesen|h|read|person|acc:read|act pass
finden||fand|gefunden|h|find|person|acc:small animal cloth read|pass
essen|isst|aß|gegessen|h|eat|person|acc:food dish|act pass
auf+machen||||h|open|person|acc:open|act pass
besuchen||||h|visit|person|acc:person relative|
schlafen|schläft|schlief|geschlafen|h|sleep|person animal|-|
arbeiten||||h|work|person|-|act
trinken||trank|getrunken|h|drink|person|acc:drink|act
helfen|hilft|half|geholfen|h|help|person|dat:person relative|
kommen||kam|gekommen|s|come|person animal|go|
gehen||ging|gegangen|s|go/walk|person|go|act
warten||||h|wait for|person|auf acc:person transport relative|
zu+machen||||h|close/shut|person|acc:open|act pass
schreiben||schrieb|geschrieben|h|write|person|acc:text|act pass
geben|gibt|gab|gegeben|h|give|person|give:give food|
kochen||||h|cook|person|acc:dish|act pass
putzen||||h|clean|person|acc:clean|act pass
spielen||||h|play|person animal|-|
spielen||||h|play|person|play|
lieben||||h|love|person|acc:person animal relative|state
mögen|mag|mochte|gemocht|h|like|person|acc:person animal food dish drink|state
brauchen||||h|need|person|acc:small cloth device vehicle|state
fahren|fährt|fuhr|gefahren|s|drive/go|person|go|act
reparieren||||h|repair/fix|person|acc:device|act pass
an+rufen||rief|gerufen|h|call/phone|person|acc:person relative|
denken||dachte|gedacht|h|think of/think about|person|an acc:person relative event|
zeigen||||h|show|person|give:give device read place|
sitzen||saß|gesessen|h|sit|person animal|sit|
lachen||||h|laugh|person|-|voice
lachen||||h|laugh at/laugh about|person|über acc:person tale|voice
verkaufen||||h|sell|person|acc:small cloth vehicle furniture|pass
ein+laden|lädt|lud|geladen|h|invite|person|acc:person relative|pass
tragen|trägt|trug|getragen|h|carry|person|acc:small|act pass
tragen|trägt|trug|getragen|h|wear|person|acc:cloth|
wohnen||||h|live|person|live|state
arbeiten||||h|work|person|live|
sprechen|spricht|sprach|gesprochen|h|talk to/speak with|person|mit dat:person relative|voice
hören||||h|hear|person animal|acc:song person animal|state
aus+schalten||||h|turn +off/switch +off|person|acc:switch|act pass
an+schalten||||h|turn +on/switch +on|person|acc:switch|act pass
stellen||||h|put/place|person|put|act
liegen||lag|gelegen|h|lie|small|lie|state
stehen||stand|gestanden|h|stand|small|lie|state
verstehen||verstand|verstanden|h|understand|person|acc:person idea tale learn|state
vergessen|vergisst|vergaß|vergessen|h|forget|person|acc:small idea learn|state pass
bringen||brachte|gebracht|h|bring|person|give:small give food dish|
an+kommen||kam|gekommen|s|arrive|person transport|-|
an+ziehen||zog|gezogen|h|put +on|person|acc:cloth|act
aus+ziehen||zog|gezogen|h|take +off|person|acc:cloth|act
auf+stehen||stand|gestanden|s|get up|person|-|act
ein+schlafen|schläft|schlief|geschlafen|s|fall asleep|person animal|-|
beginnen||begann|begonnen|h|begin/start|event|-|
an+fangen|fängt|fing|gefangen|h|start/begin|event|-|
erzählen||||h|tell|person|give:tale|
schicken||||h|send|person|give:text give|
malen||||h|paint|person|acc:person animal plant place|pass
streichen||strich|gestrichen|h|paint|person|acc:paint|act pass
kennen||kannte|gekannt|h|know|person|acc:person place tale|state
gehören||||h|belong to|small vehicle cloth|dat:person relative|state
gefallen|gefällt|gefiel|gefallen|h|like|cloth event tale sight|dat:person relative|state swap
danken||||h|thank|person|dat:person relative|
folgen||||s|follow|person animal|dat:person animal|act
antworten||||h|answer|person|dat:person relative|voice
zu+hören||||h|listen to|person|dat:person relative|
träumen||||h|dream of/dream about|person|von dat:animal event vehicle person|
singen||sang|gesungen|h|sing|person|acc:song|voice pass
freuen||||h|look forward to|person|auf acc:event|refl state
erinnern||||h|remember|person|an acc:person event place|refl state
interessieren||||h|be interested in|person|für acc:event idea animal learn|refl state
beschweren||||h|complain about|person|über acc:weather dish event|refl voice
auf+passen||||h|look after/take care of|person|auf acc:animal person|
teil+nehmen|nimmt|nahm|genommen|h|take part in/participate in|person|an dat:event|
lernen||||h|learn/study|person|acc:learn|act
erklären||||h|explain|person|give:idea|
besichtigen||||h|visit/tour|person|acc:sight|
füttern||||h|feed|person|acc:animal|act pass
waschen|wäscht|wusch|gewaschen|h|wash|person|acc:cloth vehicle|act pass
fangen|fängt|fing|gefangen|h|catch|person animal|acc:animal|pass
ab+holen||||h|pick +up/collect|person|acc:person relative|
mit+nehmen|nimmt|nahm|genommen|h|take +along/bring +along|person|acc:small cloth read|
weg+werfen|wirft|warf|geworfen|h|throw +away|person|acc:cloth read small|pass
auf+räumen||||h|tidy +up/clean +up|person|acc:room|act
verlieren||verlor|verloren|h|lose|person|acc:small cloth|
stehlen|stiehlt|stahl|gestohlen|h|steal|person|acc:small vehicle|pass
bezahlen||||h|pay for|person|acc:food drink small|
laufen|läuft|lief|gelaufen|s|run|person animal|go|
fliegen||flog|geflogen|s|fly|person|go|
bleiben||blieb|geblieben|s|stay|person|live|
an+sehen|sieht|sah|gesehen|h|watch|person|acc:show|
pflanzen||||h|plant|person|acc:plant|act pass
lösen||||h|solve|person|acc:idea|act pass
sammeln||||h|collect|person|acc:small read|
schwimmen||schwamm|geschwommen|s|swim|person animal|-|act
tanzen||||h|dance|person|-|
weinen||||h|cry/weep|person|-|voice
bellen|||gebellt|h|bark|dog|-|voice
retten||||h|save/rescue|person|acc:person animal|pass
trösten||||h|comfort/console|person|acc:person relative|pass
vermissen||||h|miss|person|acc:person relative animal|state
ab+fahren|fährt|fuhr|gefahren|s|leave/depart|transport|-|
auf+wachen||||s|wake up|person animal|-|
ein+steigen||stieg|gestiegen|s|get on/board|person|in acc:transport|act
versuchen||||h|try|person|zu|
beschließen||beschloss|beschlossen|h|decide|person|zu|
vergessen|vergisst|vergaß|vergessen|h|forget|person|zu|state
hoffen||||h|hope|person|zu|
versprechen|verspricht|versprach|versprochen|h|promise|person|zu|
an+fangen|fängt|fing|gefangen|h|begin/start|person|zu|
planen||||h|plan|person|zu|
wissen|weiß|wusste|gewusst|h|know|person|dass|state
sagen||||h|say|person|dass|
glauben||||h|think/believe|person|dass|state
hoffen||||h|hope|person|dass|state
hören||||h|hear|person|dass|state
bemerken||||h|notice|person|dass|state
behaupten||||h|claim|person|dass|
fragen||||h|ask|person|ob|
"""
