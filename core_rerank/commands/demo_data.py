"""The demo's queries and documents: one document answers its query, the others only come near."""

from __future__ import annotations

from dataclasses import dataclass

from core_rerank.types import Document


@dataclass(frozen=True, slots=True)
class DemoQuery:
    """A query, its documents, and the id of the one document that answers it."""

    query: str
    expected: str
    documents: tuple[Document, ...]


def _documents(texts: dict[str, tuple[str, str]]) -> tuple[Document, ...]:
    return tuple(Document(text, doc_id, title) for doc_id, (title, text) in texts.items())


DEMO = (
    DemoQuery(
        "Why do leaves turn red and yellow in autumn?",
        "leaf-colour",
        _documents(
            {
                "leaf-shape": (
                    "Leaf shapes",
                    "Botanists sort leaves by their outline: needles, scales, simple blades and "
                    "compound leaves made of many leaflets. Oaks have lobed leaves, beeches "
                    "smooth oval ones, and horse chestnuts spread five or seven leaflets like a "
                    "hand.",
                ),
                "evergreens": (
                    "Evergreen trees",
                    "Pines, spruces and firs keep their needles for several years. A thick "
                    "layer of wax and a small surface save water, so these trees need not drop "
                    "their foliage when the ground freezes.",
                ),
                "leaf-colour": (
                    "Pigments in the forest",
                    "When days grow short and cool, trees stop making chlorophyll and the green "
                    "fades from their leaves. Yellow carotenoids that were there all summer "
                    "become visible, and in maples sugar trapped in the leaf is turned into red "
                    "anthocyanins.",
                ),
                "compost": (
                    "Making compost",
                    "A good heap mixes green kitchen scraps with brown material such as straw, "
                    "cardboard and fallen leaves. Turn it every few weeks, keep it moist, and "
                    "after half a year it has become dark, crumbly soil.",
                ),
                "monarchs": (
                    "The journey of the monarchs",
                    "Every autumn millions of monarch butterflies leave Canada and the United "
                    "States and fly up to four thousand kilometres to a few mountain forests in "
                    "Mexico, where they spend the winter clinging to fir trees.",
                ),
                "paint": (
                    "Mixing paint",
                    "A painter gets orange from red and yellow, and a warm brown by adding a "
                    "little blue. Earth colours such as ochre and sienna come from iron oxides "
                    "dug out of the ground.",
                ),
                "harvest": (
                    "Harvest festivals",
                    "In many countries people give thanks for the harvest in September or "
                    "October. Churches are decorated with corn and pumpkins, and in Germany a "
                    "village may crown a harvest queen.",
                ),
                "equinox": (
                    "The equinox",
                    "Around 22 September the sun stands above the equator, and day and night "
                    "last about equally long all over the world. It marks the beginning of "
                    "autumn in the northern half of the globe.",
                ),
            }
        ),
    ),
    DemoQuery(
        "Who invented the World Wide Web?",
        "berners-lee",
        _documents(
            {
                "arpanet": (
                    "ARPANET",
                    "In 1969 four American universities were joined in a network paid for by "
                    "the Department of Defense. Its packets of data travelled over leased "
                    "telephone lines, and its protocols later grew into the internet.",
                ),
                "email": (
                    "The first e-mail",
                    "Ray Tomlinson sent the first message between two computers in 1971. He "
                    "chose the @ sign to part the name of the user from the name of the "
                    "machine, and the habit has never changed.",
                ),
                "spiders": (
                    "How spiders spin",
                    "An orb weaver begins its web with a single bridge thread carried by the "
                    "wind. Then it lays the spokes, and last a sticky spiral that catches "
                    "insects. Many species eat the old web and spin a new one every night.",
                ),
                "telephone": (
                    "The telephone",
                    "Alexander Graham Bell received a patent for the telephone in March 1876, "
                    "only hours before Elisha Gray filed his own papers. The first words he "
                    "spoke over the line called his assistant Watson.",
                ),
                "browsers": (
                    "The browser wars",
                    "In the late 1990s Netscape and Microsoft fought for the desktop. Internet "
                    "Explorer came free with Windows, won nine tenths of all users, and was "
                    "later overtaken by Firefox and Chrome.",
                ),
                "berners-lee": (
                    "Tim Berners-Lee",
                    "The World Wide Web was invented in 1989 by the British physicist Tim "
                    "Berners-Lee while he worked at CERN near Geneva. He wrote the first "
                    "server, the first browser and the first web page, and gave them away "
                    "freely.",
                ),
                "search": (
                    "Ranking pages",
                    "Early search engines counted words. Larry Page and Sergey Brin had the "
                    "idea of counting links as votes for a page, and founded Google in a rented "
                    "garage in California in 1998.",
                ),
                "printing": (
                    "Movable type",
                    "Johannes Gutenberg cast single letters from a lead alloy and printed his "
                    "Bible in Mainz around 1455. Within fifty years presses stood in more than "
                    "two hundred European towns.",
                ),
            }
        ),
    ),
    DemoQuery(
        "How does a vaccine protect the body against a disease?",
        "vaccines",
        _documents(
            {
                "antibiotics": (
                    "Antibiotics",
                    "Penicillin and its relatives kill bacteria by breaking the walls of their "
                    "cells. They do nothing against viruses such as influenza, and careless use "
                    "breeds bacteria that resist them.",
                ),
                "handwashing": (
                    "Clean hands",
                    "In 1847 Ignaz Semmelweis asked the doctors of a Vienna clinic to wash "
                    "their hands in chlorinated lime. Deaths of young mothers fell at once, but "
                    "his colleagues refused to believe him for years.",
                ),
                "bones": (
                    "Broken bones",
                    "A fracture heals in stages. Blood clots around the break, soft cartilage "
                    "bridges it within weeks, and bone cells slowly replace the cartilage with "
                    "a hard callus.",
                ),
                "plague": (
                    "The Black Death",
                    "Between 1347 and 1351 plague killed perhaps a third of the people of "
                    "Europe. The disease travelled with rats and fleas on merchant ships, and "
                    "ports began to hold arriving crews for forty days.",
                ),
                "firewalls": (
                    "Computer viruses",
                    "A virus scanner compares files with a list of known patterns, and a "
                    "firewall protects the network by refusing connections nobody asked for. "
                    "Both need updates to stay useful.",
                ),
                "diet": (
                    "Eating well",
                    "Doctors advise plenty of vegetables, whole grains and fish, and little "
                    "sugar and salt. Such a diet lowers the risk of heart disease, and so does "
                    "half an hour of walking a day.",
                ),
                "vaccines": (
                    "Training the immune system",
                    "A vaccine shows the body a harmless piece of a germ. The immune system "
                    "answers with antibodies and memory cells, so that when the real disease "
                    "comes years later it is recognised and fought before it can spread.",
                ),
                "xrays": (
                    "Looking inside",
                    "Wilhelm Röntgen found in 1895 that invisible rays passed through his hand "
                    "and left the shadow of its bones on a plate. Within a year hospitals used "
                    "X-rays to find bullets and fractures.",
                ),
            }
        ),
    ),
)
