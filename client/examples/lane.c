/* Asks addsub, which `make serve` serves, over a lane from C: inputs and outputs in memory that the worker sees too, one record a
 * call.
 *
 *     cc -std=c11 -O2 -I../include lane.c -o lane
 *     ./lane /tmp/tensord-$(id -u)/clients.sock 10000           ($XDG_RUNTIME_DIR/tensord/clients.sock where that is set)
 */

#include <tensord_lane.h>

#define WIDTH 16

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int ascending(const void *left, const void *right) {
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

static int failed(const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    return 1;
}

int main(int count, char **arguments) {
    tensord_client client;
    if (count < 2)
        return failed("usage", "lane SOCKET [CALLS]");
    long calls = count > 2 ? strtol(arguments[2], NULL, 10) : 1000;
    if (tensord_connect(&client, arguments[1]))
        return failed("connect", client.error);
    tensord_lane *lane = tensord_open(&client, "addsub", 0, 10.0);
    if (lane == NULL)
        return failed("open", client.error);

    /* Four tensors in one segment. */
    tensord_place memory, place[4];
    if (tensord_empty(lane, 4096, &memory))
        return failed("empty", lane->error);
    for (int i = 0; i < 4; i++)
        place[i] = tensord_part(&memory, WIDTH * sizeof(float));
    float *a = (float *)place[0].memory, *b = (float *)place[1].memory;
    const float *sum = (const float *)place[2].memory, *difference = (const float *)place[3].memory;

    /* What all calls have in common is said once. */
    const int64_t shape[2] = {1, WIDTH};
    const tensord_tensor inputs[2] = {{"INPUT0", "FP32", 2, shape, &place[0]}, {"INPUT1", "FP32", 2, shape, &place[1]}};
    const tensord_wanted outputs[2] = {{"OUTPUT0", &place[2]}, {"OUTPUT1", &place[3]}};
    if (tensord_prepare(lane, 0, "addsub", 0, inputs, 2, outputs, 2))
        return failed("prepare", lane->error);

    static tensord_answer answer;
    uint64_t *took = (uint64_t *)malloc((size_t)(calls > 0 ? calls : 1) * sizeof *took);
    if (took == NULL)
        return failed("malloc", "no memory");
    for (long call = 0; call < calls; call++) {
        for (int i = 0; i < WIDTH; i++) {
            a[i] = (float)(call % 1000 + i);
            b[i] = 1;
        }
        uint64_t begun = now_ns();
        if (tensord_call(lane, 0, NULL, 0, 0, &answer))
            return failed("call", lane->error);
        took[call] = now_ns() - begun;
        if (answer.code[0])
            return failed(answer.code, answer.message);
        for (int i = 0; i < WIDTH; i++)
            if (sum[i] != a[i] + 1 || difference[i] != a[i] - 1)
                return failed("answer", "it is wrong");
        tensord_release(lane, &answer);
    }

    /* The same with bytes inside the request, and outputs wherever the worker puts them. */
    const tensord_tensor own[2] = {{"INPUT0", "FP32", 2, shape, NULL}, {"INPUT1", "FP32", 2, shape, NULL}};
    const tensord_bytes contents[2] = {{a, WIDTH * sizeof(float)}, {b, WIDTH * sizeof(float)}};
    if (tensord_prepare(lane, 1, "addsub", 0, own, 2, NULL, 0) || tensord_call(lane, 1, contents, 2, now_ns() + 60000000000u, &answer))
        return failed("call", lane->error);
    for (int i = 0; i < answer.outputs; i++) {
        float first; /* what travels inside an answer lies at any address */
        memcpy(&first, answer.output[i].content, sizeof first);
        printf("%.*s[0] = %g\n", (int)answer.output[i].name_size, answer.output[i].name, (double)first);
    }
    tensord_release(lane, &answer);

    /* What is wrong with a request is said, and costs only that one. */
    if (tensord_prepare(lane, 2, "addsub", 0, own, 1, NULL, 0) || tensord_call(lane, 2, contents, 1, 0, &answer))
        return failed("call", lane->error);
    printf("%s: %s\n", answer.code, answer.message);

    qsort(took, (size_t)calls, sizeof *took, ascending);
    if (calls > 0)
        printf("%ld calls, the median took %.1f us\n", calls, (double)took[calls / 2] / 1000);
    free(took);
    tensord_close(&client);
    return 0;
}
