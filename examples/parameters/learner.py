"""Runs a learner that pushes a policy, and actors that ask it: REINFORCE on a pole that is balanced on a cart.

python examples/parameters/learner.py [--url ADDRESS] [--pushes N] [--plot return.png]        (pip install tensord-client jax)

Actors play against the served model "cartpole" and know nothing of its parameters. After each round of games the learner takes a
step along the gradient and pushes the new parameters as the next version; each answer says which version computed it. The learner
knows the parameters and not the function: the logits, and the gradient by the parameters, are the served model's own.
"""

import argparse
import queue
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import tensord_client

GAMES, LONGEST = 32, 200
RATE, DISCOUNT, ENTROPY = 0.01, 0.99, 0.01


class Cart:
    """Plays many games at the same time. Source: Barto, Sutton and Anderson (1983), as Gym's CartPole has it."""

    def __init__(self, count, seed):
        self.random = np.random.default_rng(seed)
        self.state = self.random.uniform(-0.05, 0.05, (count, 4)).astype(np.float32)
        self.alive = np.ones(count, bool)

    def step(self, actions):
        """Pushes each cart left (0) or right (1); a game ends when the pole falls or the cart leaves."""
        x, speed, angle, turn = self.state.T
        force = np.where(actions == 1, 10.0, -10.0)
        sine, cosine = np.sin(angle), np.cos(angle)
        push = (force + 0.05 * turn**2 * sine) / 1.1
        turning = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        moving = push - 0.05 * turning * cosine / 1.1
        after = np.stack([x + 0.02 * speed, speed + 0.02 * moving, angle + 0.02 * turn, turn + 0.02 * turning], 1)
        self.state = after.astype(np.float32)
        self.alive = self.alive & (abs(after[:, 0]) < 2.4) & (abs(after[:, 2]) < 0.2095)


def play(policy, seed):
    """Plays a round of games with the policy that is served now.

    Returns states, actions, which games were still going on, and the parameter versions that answered.
    """
    games, random = Cart(GAMES, seed), np.random.default_rng(seed)
    states, actions, alive, numbers = [], [], [], set()
    while games.alive.any() and len(states) < LONGEST:
        answer = policy({"state": games.state}, parameters={"tensord_parameters": True})
        numbers.add(answer.parameters["parameter_version"])
        chosen = (random.gumbel(size=(GAMES, 2)) + answer["logits"]).argmax(1)
        states.append(games.state)
        actions.append(chosen)
        alive.append(games.alive)
        games.step(chosen)
    return np.stack(states), np.stack(actions), np.stack(alive), numbers


def act(url, seed, rounds, stop):
    """Plays round after round until ``stop`` is set, with nothing but a client, and puts the results into the queue."""
    with tensord_client.connect(url) as client:
        policy = client.model("cartpole", timeout=60)
        while not stop.is_set():
            seed += 1
            found = play(policy, seed)
            while not stop.is_set():
                try:
                    rounds.put(found, timeout=0.1)
                    break
                except queue.Full:
                    pass


def loss(logits, actions, returns, weights):
    """Returns REINFORCE's loss: games that went well become likelier, and an entropy term keeps the policy exploring."""
    chances = jax.nn.log_softmax(logits)
    taken = jnp.take_along_axis(chances, actions[:, None], 1)[:, 0]
    curious = -(jnp.exp(chances) * chances).sum(1)
    return -((taken * returns + ENTROPY * curious) * weights).sum() / weights.sum()


by_logits = jax.jit(jax.grad(loss))


@jax.jit
def climb(params, means, squares, count, slope):
    """Takes one step of Adam; returns the parameters and Adam's two averages."""
    means = jax.tree.map(lambda mean, each: 0.9 * mean + 0.1 * each, means, slope)
    squares = jax.tree.map(lambda square, each: 0.999 * square + 0.001 * each**2, squares, slope)

    def stepped(value, mean, square):
        return value - RATE * (mean / (1 - 0.9**count)) / (jnp.sqrt(square / (1 - 0.999**count)) + 1e-8)

    return jax.tree.map(stepped, params, means, squares), means, squares


def returns_of(alive):
    """Computes each game's discounted return from each step on, relative to the mean of the games still alive at that step."""
    found, after = np.zeros(alive.shape, np.float32), np.zeros(alive.shape[1], np.float32)
    for at in reversed(range(len(alive))):
        after = (1 + DISCOUNT * after) * alive[at]
        found[at] = after
    better = found - ((found * alive).sum(1) / np.maximum(alive.sum(1), 1))[:, None]
    return (better / (better[alive].std() + 1e-6)).astype(np.float32)


def learn(client, rounds, pushes):
    """Learns from the rounds that were played and pushes new parameters.

    Yields the version that was pushed, the mean return of the round, and the versions that it was played with.
    """
    policy = client.model("cartpole")
    params = begin()
    means = squares = jax.tree.map(jnp.zeros_like, params)
    for count in range(1, pushes + 1):
        states, actions, alive, numbers = rounds.get()
        played = (states, actions, returns_of(alive), alive.astype(np.float32))
        # One shape, so that it is compiled once.
        padded = [
            np.concatenate([each, np.zeros((LONGEST - len(each), *each.shape[1:]), each.dtype)]) for each in played
        ]
        states, *flat = [each.reshape(-1, *each.shape[2:]) for each in padded]
        cotangents = by_logits(policy({"state": states})["logits"], *flat)
        slope = policy.parameters.gradient({"state": states}, {"logits": cotangents})
        params, means, squares = climb(params, means, squares, count, slope)
        number = policy.parameters.update(params)
        yield number, float(alive.sum(0).mean()), sorted(numbers)


def begin(seed=0):
    """Makes the parameters that the model has at first."""
    first = jax.random.normal(jax.random.key(seed), (4, 32)) * 0.5
    return {
        "hidden": {"kernel": first, "bias": jnp.zeros(32)},
        "action": {"kernel": jnp.zeros((32, 2)), "bias": jnp.zeros(2)},
    }


def draw(found, picture):
    """Draws the return of each round over the version that was pushed after it."""
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(figsize=(7, 3))
    axes.plot([number for number, _ in found], [mean for _, mean in found])
    axes.set_xlabel("number of the parameters")
    axes.set_ylabel("mean return of a round")
    drawn.tight_layout()
    drawn.savefig(picture)


def main():
    """Learns. Returns 0 if the last rounds went better than the first ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server; without it the daemon of this host is looked for")
    parser.add_argument("--pushes", type=int, default=60)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--plot", help="the picture that is written")
    told = parser.parse_args()
    rounds, stop = queue.Queue(1), threading.Event()
    actors = [threading.Thread(target=act, args=(told.url, 1000 * seed, rounds, stop)) for seed in range(told.actors)]
    found = []
    with tensord_client.connect(told.url) as client:
        for each in actors:
            each.start()
        try:
            for number, mean, numbers in learn(client, rounds, told.pushes):
                found.append((number, mean))
                print(f"pushed {number}: a round by {numbers[0]} to {numbers[-1]} returned {mean:.1f}", flush=True)
        finally:
            stop.set()
            for each in actors:
                each.join()
    if told.plot:
        draw(found, told.plot)
    first, last = (np.mean([mean for _, mean in part]) for part in (found[:5], found[-5:]))
    return 0 if last > first else 1


if __name__ == "__main__":
    sys.exit(main())
