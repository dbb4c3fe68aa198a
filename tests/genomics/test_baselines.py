"""Words of k nucleotides and lengths: counted by hand, and the baselines against their definitions."""

import numpy as np
import pytest

from genomics.genomics_cases import letters, sequences, tiny_fit, words_of
from titans_lm.genomics.model import STRENGTHS, features, fit_baseline
from titans_lm.genomics.records import PAD, Sequences, encode, reverse_complement
from titans_lm.genomics.settings import extra


def words(text: str, k: int, baseline: str = "kmer-nb") -> dict[int, float]:
    """The numbers of the words of a sequence, and how often each is there."""
    [found] = features([encode(text, "s")], tiny_fit(baseline=baseline, k=k)).toarray()
    assert found.shape == (4**k,)
    return {int(number): found[number] for number in found.nonzero()[0]}


def test_words_by_hand() -> None:
    assert words("ACGT", 2) == {0 * 4 + 1: 1, 1 * 4 + 2: 1, 2 * 4 + 3: 1}
    assert words("ACNGT", 2) == {1: 1, 11: 1}, "no word with an N in it"
    assert words("TTTT", 3) == {63: 2}, "overlapping ones too"
    assert words("AC", 3) == words("NNN", 1) == words("AC", 3, "kmer-lr") == {}
    assert words("ANNCAA", 1, "kmer-lr") == {0: 0.75, 1: 0.25}, "shares of the words that are there"


def test_words_are_counted_by_sequence() -> None:
    """None reaches into the next one; padding is left out."""
    rows = [encode(text, "s") for text, _ in letters(8)]
    rows[1], rows[2] = rows[1][:2], np.append(rows[2], np.full(3, PAD, np.uint8))
    expected = [np.bincount(words_of(row[row != PAD], 3), minlength=64) for row in rows]
    np.testing.assert_array_equal(features(rows, tiny_fit(baseline="kmer-nb", k=3)).toarray(), expected)
    assert features([], tiny_fit(baseline="kmer-nb", k=3)).shape == (0, 64)


def parts(seed: int = 0):
    data = sequences(letters(48, seed))
    return data.take(list(range(32))), data.take(list(range(32, 48)))


def test_naive_bayes_by_hand() -> None:
    """log p(class) + Σ_w c_w log p(w | class), with one more of every word."""
    train, valid = parts()
    classifier, told = fit_baseline(tiny_fit(baseline="kmer-nb", k=2), train, valid)
    assert told == {}, "nothing is chosen"
    tokens, labels = [*train.tokens, *valid.tokens], np.concatenate([train.labels, valid.labels])
    counts = np.array([np.bincount(words_of(row, 2), minlength=16) for row in tokens])
    by_class = np.array([counts[labels == number].sum(0) + 1.0 for number in (0, 1)])
    joint = counts @ np.log(by_class / by_class.sum(1, keepdims=True)).T + np.log(np.bincount(labels) / len(labels))
    expected = np.exp(joint) / np.exp(joint).sum(1, keepdims=True)
    np.testing.assert_allclose(classifier.probabilities(tokens), expected, rtol=1e-9)


@pytest.mark.parametrize("classes", [2, 3])
def test_logistic_regression_is_scikit_learns(classes: int) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows = [
        (text, label if number % 3 or classes == 2 else "third") for number, (text, label) in enumerate(letters(48))
    ]
    data = sequences(rows)
    train, valid = data.take(list(range(32))), data.take(list(range(32, 48)))
    classifier, told = fit_baseline(tiny_fit(baseline="kmer-lr", k=2), train, valid)
    assert told["strength"] in STRENGTHS["kmer-lr"]
    assert 0.0 <= told["validation_accuracy"] <= 1.0

    def shares(tokens):
        counts = np.array([np.bincount(words_of(row, 2), minlength=16) for row in tokens], float)
        return counts / counts.sum(1, keepdims=True)

    peer = make_pipeline(StandardScaler(with_mean=False), LogisticRegression(C=told["strength"], max_iter=5000))
    peer.fit(shares(data.tokens), data.labels)
    expected = peer.predict_proba(shares(data.tokens))
    np.testing.assert_allclose(classifier.probabilities(data.tokens), expected, atol=1e-4)


def test_the_strength_is_that_which_is_best_on_the_validation_part() -> None:
    """What could not be seen in training decides: with classes turned round there, the weakest fit is taken."""
    train, valid = parts()
    turned = Sequences(valid.names, valid.tokens, 1 - valid.labels, valid.classes)
    strong = fit_baseline(tiny_fit(baseline="kmer-lr", k=2), train, valid)[1]["strength"]
    weak = fit_baseline(tiny_fit(baseline="kmer-lr", k=2), train, turned)[1]["strength"]
    assert weak < strong


def test_the_other_strand_may_be_learned_too() -> None:
    train, valid = parts()
    both, _ = fit_baseline(tiny_fit(baseline="kmer-nb", k=2, reverse_complement=True), train, valid)
    other = [reverse_complement(row) for row in train.tokens]
    np.testing.assert_allclose(both.probabilities(other), both.probabilities(train.tokens), rtol=1e-9)
    one, _ = fit_baseline(tiny_fit(baseline="kmer-nb", k=2), train, valid)
    assert not np.allclose(one.probabilities(other), one.probabilities(train.tokens))


def test_sequences_without_a_word_have_the_odds_of_the_classes() -> None:
    train, valid = parts()
    classifier, _ = fit_baseline(tiny_fit(baseline="kmer-nb", k=4), train, valid)
    np.testing.assert_allclose(classifier.probabilities([encode("ANA", "s")]), [[0.5, 0.5]])


def test_the_length_alone_tells_what_it_can() -> None:
    """Lengths that no threshold divides, and letters that say nothing; the strength is that of scikit-learn's fit."""
    rng = np.random.default_rng(0)
    rows = [("A" * int(rng.choice((20, 40))), "round") for _ in range(30)] + [("A" * 30, "odd") for _ in range(18)]
    data = sequences([rows[place] for place in rng.permutation(len(rows))])
    train, valid = data.take(list(range(32))), data.take(list(range(32, 48)))
    classifier, told = fit_baseline(tiny_fit(baseline="length"), train, valid)
    assert told["strength"] in STRENGTHS["length"]
    assert told["validation_accuracy"] == 1.0
    assert (classifier.probabilities(data.tokens).argmax(1) == data.labels).all()
    changed = [np.full_like(row, 3) for row in data.tokens]
    np.testing.assert_array_equal(classifier.probabilities(changed), classifier.probabilities(data.tokens))


def test_what_is_missing_is_said_with_its_remedy() -> None:
    with pytest.raises(ValueError, match=r"got no surely_missing, .*pip install 'titans-lm\[genomics\]'"):
        extra("surely_missing.part")
