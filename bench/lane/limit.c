/* The lower limit of a lane: two processes that pass the same bytes through shared memory, and a word over a SEQPACKET socket.
 *
 *     limit INPUT_BYTES OUTPUT_BYTES SECONDS
 *
 * One writes the input's first word and asks; the other copies the output out of the input (again and again, where it is larger)
 * and answers; the first checks the word. Prints JSON: answers, seconds, p50_us, client_us and server_us, the processor time of each
 * for an answer.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#define KEPT (1 << 20)

static double now(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec * 1e-3;
}

static void fail(const char *what) {
    perror(what);
    exit(EXIT_FAILURE);
}

static void serve(int fd, const uint8_t *input, size_t input_size, uint8_t *output, size_t output_size) {
    uint64_t word;
    while (recv(fd, &word, sizeof word, 0) == sizeof word) {
        for (size_t at = 0; at < output_size; at += input_size)
            memcpy(output + at, input, output_size - at < input_size ? output_size - at : input_size);
        if (send(fd, &word, sizeof word, MSG_NOSIGNAL) != sizeof word)
            break;
    }
    _exit(EXIT_SUCCESS);
}

static int by_size(const void *one, const void *other) {
    double a = *(const double *)one, b = *(const double *)other;
    return a < b ? -1 : a > b;
}

int main(int count, char **words) {
    if (count != 4)
        return EXIT_FAILURE;
    size_t input_size = strtoul(words[1], NULL, 10), output_size = strtoul(words[2], NULL, 10);
    double length_us = 1e6 * strtod(words[3], NULL);
    int fds[2];
    if (input_size < 8 || output_size < 8 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds))
        fail("socketpair");
    uint8_t *memory = mmap(NULL, input_size + output_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    double *took = malloc(KEPT * sizeof *took);
    if (memory == MAP_FAILED || took == NULL)
        fail("memory");
    memset(memory, 1, input_size + output_size);
    pid_t child = fork();
    if (child < 0)
        fail("fork");
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(fds[0]);
        serve(fds[1], memory, input_size, memory + input_size, output_size);
    }
    close(fds[1]);
    double began = now(CLOCK_MONOTONIC), used = now(CLOCK_PROCESS_CPUTIME_ID), at = began;
    uint64_t answers = 0;
    while (at - began < length_us) {
        uint64_t word = answers, said = 0, found;
        memcpy(memory, &word, sizeof word);
        if (send(fds[0], &word, sizeof word, MSG_NOSIGNAL) != sizeof word || recv(fds[0], &said, sizeof said, 0) != sizeof said)
            fail("the other end is gone");
        memcpy(&found, memory + input_size, sizeof found);
        if (said != word || found != word) {
            fprintf(stderr, "wrong answer\n");
            return EXIT_FAILURE;
        }
        double ended = now(CLOCK_MONOTONIC);
        took[answers++ % KEPT] = ended - at;
        at = ended;
    }
    used = now(CLOCK_PROCESS_CPUTIME_ID) - used;
    close(fds[0]);
    struct rusage other;
    if (wait4(child, NULL, 0, &other) != child)
        fail("wait4");
    size_t kept = answers < KEPT ? answers : KEPT;
    qsort(took, kept, sizeof *took, by_size);
    double theirs = 1e6 * (double)(other.ru_utime.tv_sec + other.ru_stime.tv_sec) + (double)(other.ru_utime.tv_usec + other.ru_stime.tv_usec);
    printf("{\"answers\": %llu, \"seconds\": %g, \"p50_us\": %.2f, \"client_us\": %.2f, \"server_us\": %.2f}\n", (unsigned long long)answers,
           (at - began) / 1e6, took[kept / 2], used / (double)answers, theirs / (double)answers);
    return EXIT_SUCCESS;
}
