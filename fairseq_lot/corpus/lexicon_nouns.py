"""The nouns of the synthetic corpus.

One line per noun: German | gender (with ``w`` when it takes -n in every case but the nominative) | German plural |
English, the usual word first | classes | flags. Flags: ``she``/``it`` where the English pronoun does not follow from
the German gender, ``mass`` for nouns without a plural, ``pair`` for those that English has only in the plural.
Places have their German and English prepositions as ``loc=in:at``.
Words with two meanings (Bank, Schloss, Gericht, Birne, Decke, Strauß) have one line per meaning; their classes put
each with other verbs. Within a class, nouns further down are drawn less often.
"""

NOUNS = """
Mann|m|Männer|man|person|
Frau|f|Frauen|woman|person|
Kind|n|Kinder|child|person relative|it
Junge|mw|Jungen|boy|person|
Mädchen|n|Mädchen|girl|person|she
Lehrer|m|Lehrer|teacher|person|
Ärztin|f|Ärztinnen|doctor|person|
Freund|m|Freunde|friend|person relative|
Bruder|m|Brüder|brother|relative|
Mutter|f|Mütter|mother|relative|
Freundin|f|Freundinnen|friend|person relative|
Schwester|f|Schwestern|sister|relative|
Arzt|m|Ärzte|doctor|person|
Lehrerin|f|Lehrerinnen|teacher|person|
Vater|m|Väter|father|relative|
Nachbar|mw|Nachbarn|neighbour|person relative|
Tochter|f|Töchter|daughter|relative|
Sohn|m|Söhne|son|relative|
Student|mw|Studenten|student|person|
Bauer|mw|Bauern|farmer|person|
Großmutter|f|Großmütter|grandmother/grandma|relative|
Koch|m|Köche|cook/chef|person|
Gast|m|Gäste|guest|person relative|
Chef|m|Chefs|boss|person relative|
Großvater|m|Großväter|grandfather/grandpa|relative|
Polizist|mw|Polizisten|policeman/police officer|person|
Kellner|m|Kellner|waiter|person|
Tante|f|Tanten|aunt|relative|
Onkel|m|Onkel|uncle|relative|
Königin|f|Königinnen|queen|person|
König|m|Könige|king|person|
Sängerin|f|Sängerinnen|singer|person|
Maler|m|Maler|painter|person|
Dame|f|Damen|lady|person|
Richter|m|Richter|judge|person|
Tourist|mw|Touristen|tourist|person|
Krankenschwester|f|Krankenschwestern|nurse|person|
Soldat|mw|Soldaten|soldier|person|
Dieb|m|Diebe|thief|person|
Hund|m|Hunde|dog|animal dog|
Katze|f|Katzen|cat|animal|
Pferd|n|Pferde|horse|animal|
Vogel|m|Vögel|bird|animal|
Kuh|f|Kühe|cow|animal|
Maus|f|Mäuse|mouse|animal|
Schaf|n|Schafe|sheep|animal|
Huhn|n|Hühner|chicken|animal|
Ente|f|Enten|duck|animal|
Hase|mw|Hasen|rabbit|animal|
Ziege|f|Ziegen|goat|animal|
Schwein|n|Schweine|pig|animal|
Esel|m|Esel|donkey|animal|
Affe|mw|Affen|monkey|animal|
Strauß|m|Strauße|ostrich|animal|
Apfel|m|Äpfel|apple|food|
Kuchen|m|Kuchen|cake|food dish|
Suppe|f|Suppen|soup|dish|
Ei|n|Eier|egg|food dish|
Birne|f|Birnen|pear|food|
Banane|f|Bananen|banana|food|
Gericht|n|Gerichte|dish/meal|dish|
Kartoffel|f|Kartoffeln|potato|food dish|
Brötchen|n|Brötchen|roll|food|
Wurst|f|Würste|sausage|food dish|
Tomate|f|Tomaten|tomato|food|
Pfannkuchen|m|Pfannkuchen|pancake|dish|
Brot|n||bread|food|mass
Käse|m||cheese|food|mass
Fleisch|n||meat|food dish|mass
Reis|m||rice|dish|mass
Kaffee|m||coffee|drink|mass
Tee|m||tea|drink|mass
Wasser|n||water|drink|mass
Milch|f||milk|drink|mass
Wein|m||wine|drink|mass
Bier|n||beer|drink|mass
Saft|m||juice|drink|mass
Buch|n|Bücher|book|read give small|
Brief|m|Briefe|letter|read text|
Zeitung|f|Zeitungen|newspaper/paper|read give small|
Bericht|m|Berichte|report|read text|
Roman|m|Romane|novel|read text|
Gedicht|n|Gedichte|poem|read text|
Artikel|m|Artikel|article|read text|
Nachricht|f|Nachrichten|message|read text|
Schlüssel|m|Schlüssel|key|small give|
Tasse|f|Tassen|cup|small|
Geschenk|n|Geschenke|present/gift|give small|
Koffer|m|Koffer|suitcase|small open|
Teller|m|Teller|plate|small|
Uhr|f|Uhren|watch/clock|device small|
Bild|n|Bilder|picture/painting|small give|
Messer|n|Messer|knife|small|
Flasche|f|Flaschen|bottle|small open|
Glas|n|Gläser|glass|small|
Korb|m|Körbe|basket|small|
Ball|m|Bälle|ball|small give|
Lampe|f|Lampen|lamp|device switch small|
Ring|m|Ringe|ring|give small|
Decke|f|Decken|blanket|small|
Kamera|f|Kameras|camera|small give device|
Strauß|m|Sträuße|bouquet|give|
Puppe|f|Puppen|doll|give small|
Löffel|m|Löffel|spoon|small|
Regenschirm|m|Regenschirme|umbrella|small give|
Topf|m|Töpfe|pot|small|
Spiegel|m|Spiegel|mirror|small|
Kissen|n|Kissen|pillow/cushion|small|
Kerze|f|Kerzen|candle|small|
Handy|n|Handys|mobile phone/cell phone|small device|
Fenster|n|Fenster|window|open clean|
Tür|f|Türen|door|open clean|
Kiste|f|Kisten|box|open small|
Tor|n|Tore|gate|open|
Schublade|f|Schubladen|drawer|open|
Licht|n|Lichter|light|switch|
Radio|n|Radios|radio|switch device|
Fernseher|m|Fernseher|television/TV|switch device|
Computer|m|Computer|computer|switch device|
Maschine|f|Maschinen|machine|switch device|
Schloss|n|Schlösser|lock|device|
Dach|n|Dächer|roof|device|
Zaun|m|Zäune|fence|device paint|
Wand|f|Wände|wall|paint|
Decke|f|Decken|ceiling|paint|
Hemd|n|Hemden|shirt|cloth|
Kleid|n|Kleider|dress|cloth|
Hose|f||trousers|cloth|pair
Mantel|m|Mäntel|coat|cloth|
Hut|m|Hüte|hat|cloth|
Jacke|f|Jacken|jacket|cloth|
Brille|f||glasses|cloth|pair
Pullover|m|Pullover|sweater/jumper|cloth|
Rock|m|Röcke|skirt|cloth|
Schal|m|Schals|scarf|cloth|
Auto|n|Autos|car|vehicle device clean|
Fahrrad|n|Fahrräder|bicycle/bike|vehicle device clean|
Zug|m|Züge|train|transport|
Bus|m|Busse|bus|transport|
Schiff|n|Schiffe|ship|transport|
Boot|n|Boote|boat|vehicle|
Flugzeug|n|Flugzeuge|plane/airplane|transport|
Straßenbahn|f|Straßenbahnen|tram|transport|
Lastwagen|m|Lastwagen|truck/lorry|vehicle device|
Garten|m|Gärten|garden|place|loc=in:in
Stadt|f|Städte|city/town|place sight|loc=in:in
Park|m|Parks|park|place|loc=in:in
Schule|f|Schulen|school|place work|loc=in:at
Haus|n|Häuser|house|place clean room sight paint|loc=in:in
Küche|f|Küchen|kitchen|place clean room|loc=in:in
Wald|m|Wälder|forest|place|loc=in:in
Markt|m|Märkte|market|place|loc=auf:at
Büro|n|Büros|office|place work clean room|loc=in:in
Museum|n|Museen|museum|place work sight|loc=in:in
Bahnhof|m|Bahnhöfe|station|place|loc=an:at
Zimmer|n|Zimmer|room|place clean room|loc=in:in
Bank|f|Banken|bank|work|loc=in:in
Dorf|n|Dörfer|village|place|loc=in:in
Krankenhaus|n|Krankenhäuser|hospital|place work|loc=in:in
Strand|m|Strände|beach|place|loc=an:on
Restaurant|n|Restaurants|restaurant|place work|loc=in:in
Straße|f|Straßen|street/road|place|loc=auf:on
Kirche|f|Kirchen|church|place sight|loc=in:in
Schloss|n|Schlösser|castle|place sight|loc=in:in
Bibliothek|f|Bibliotheken|library|place work|loc=in:in
Fluss|m|Flüsse|river|place|loc=an:by
See|m|Seen|lake|place|loc=an:by
Fabrik|f|Fabriken|factory|work|loc=in:in
Hof|m|Höfe|courtyard|place|loc=in:in
Gericht|n|Gerichte|court|work|loc=in:in
Brücke|f|Brücken|bridge|place sight|loc=auf:on
Hafen|m|Häfen|harbour|place|loc=in:in
Keller|m|Keller|cellar/basement|place clean room|loc=in:in
Feld|n|Felder|field|place|loc=auf:in
Turm|m|Türme|tower|place sight|loc=in:in
Insel|f|Inseln|island|place|loc=auf:on
Tisch|m|Tische|table|surface furniture|
Bank|f|Bänke|bench|seat paint|
Stuhl|m|Stühle|chair|surface seat furniture paint|
Bett|n|Betten|bed|surface seat furniture|
Regal|n|Regale|shelf|surface furniture|
Sofa|n|Sofas|sofa/couch|seat furniture|
Schrank|m|Schränke|cupboard|furniture|
Teppich|m|Teppiche|carpet/rug|surface clean|
Baum|m|Bäume|tree|plant|
Blume|f|Blumen|flower|plant give|
Rose|f|Rosen|rose|plant give|
Film|m|Filme|film/movie|event show|
Konzert|n|Konzerte|concert|event|
Spiel|n|Spiele|game/match|event show|
Fest|n|Feste|party/celebration|event|
Prüfung|f|Prüfungen|exam/test|event|
Sitzung|f|Sitzungen|meeting|event|
Vortrag|m|Vorträge|talk/lecture|event|
Hochzeit|f|Hochzeiten|wedding|event|
Reise|f|Reisen|journey/trip|event|
Frage|f|Fragen|question|idea|
Geschichte|f|Geschichten|story|tale|
Problem|n|Probleme|problem|idea|
Lied|n|Lieder|song|song|
Plan|m|Pläne|plan|idea|
Aufgabe|f|Aufgaben|task/exercise|idea|
Witz|m|Witze|joke|tale|
Regel|f|Regeln|rule|idea|
Sprache|f|Sprachen|language|learn|
Wort|n|Wörter|word|learn|
Klavier|n|Klaviere|piano|instrument|
Geige|f|Geigen|violin|instrument|
Gitarre|f|Gitarren|guitar|instrument|
Flöte|f|Flöten|flute|instrument|
Regen|m||rain|weather|mass
Wetter|n||weather|weather|mass
Sturm|m|Stürme|storm|weather|
Schnee|m||snow|weather|mass
Lärm|m||noise|weather|mass
Hitze|f||heat|weather|mass
Kälte|f||cold|weather|mass
"""
