/* A front process and a worker process that pass bytes and do nothing else: the least that a server made of two can cost.
 *
 *     native_chain --port P --spin-us N --answers FILE          port 0: any; it says which
 *
 *     clients == HTTP ==> front -- one datagram with all that came in one turn of its loop --> worker
 *             <==========       <-- one datagram with the answers to all of them ------------
 *
 *     a datagram, either way:  | connection u32 | two tensors, FP32[1, 16] each |  once for each request
 *
 * A request with the same head and JSON, byte for byte, as the last one of its connection is not looked at: its tensors go to the
 * worker, which adds and subtracts them as the model `addsub` does, and what comes back is sent behind a head that FILE holds.
 * Whatever else is asked has its whole answer there (bench/native_chain.py writes it), of which only the counts change:
 *
 *     METHOD PATH SIZE\n      the first is inference, and what follows is what stands before the tensors of its answer
 *     SIZE bytes              COUNTER in it becomes the number of inference requests answered so far
 *
 * Whoever waits looks for N microseconds before it sleeps, and yields its core between two looks; 0: it sleeps at once.
 *
 * Everything is bounded: there are CONNECTIONS places, and each may ask one thing at a time, in REQUEST_SIZE bytes. A request that
 * does not fit, or that comes before the last one's answer, ends its connection, and so does an answer that the client's socket
 * does not take whole. SIGTERM or SIGINT ends the front; the worker ends when the other end of its socket is closed.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CONNECTIONS 64
#define REQUEST_SIZE 4096
#define ANSWERS 16
#define ANSWER_SIZE 8192
#define ELEMENTS 16
#define TENSORS_SIZE (2 * ELEMENTS * sizeof(float))
/* As wide as the largest count; JSON does not mind the spaces in front of a smaller one. */
#define COUNTER "####################"
#define COUNTER_SIZE (sizeof COUNTER - 1)

/* What an event is about, besides the numbers of connections. */
enum { LISTENER = CONNECTIONS, WORKER, SIGNALS, EVENTS };

typedef struct {
    uint32_t connection;
    float tensors[2][ELEMENTS];
} record_t;

typedef struct {
    /* -1: nobody is here. The place is free once nothing of it is with the worker, or somebody else would get that answer. */
    int fd;
    bool asked;
    size_t received;
    /* Of head and JSON of the last inference request; 0: there was none. */
    size_t known;
    char request[REQUEST_SIZE + 1]; /* one more for the zero behind what was received */
    char head[REQUEST_SIZE];
} connection_t;

typedef struct {
    const char *request, *text; /* "METHOD PATH " and what is answered */
    size_t request_size, size;
} answer_t;

typedef struct {
    int poll, listener, worker;
    connection_t connections[CONNECTIONS];
    /* What came in this turn. */
    record_t waiting[CONNECTIONS];
    size_t waiting_count;
    answer_t answers[ANSWERS];
    size_t answer_count;
    unsigned long long answered;
} front_t;

static long spin_us;

static int64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* The next datagram. The worker has one descriptor to wait for, so it needs no epoll. 0 or less: the front is gone. */
static ssize_t receive(int front, record_t *records, size_t size) {
    for (int64_t until = spin_us ? now_us() + spin_us : 0; until != 0 && now_us() < until; sched_yield()) {
        ssize_t received = recv(front, records, size, MSG_DONTWAIT);
        if (received >= 0 || errno != EAGAIN)
            return received;
    }
    return recv(front, records, size, 0);
}

static void work(int front) {
    static record_t records[CONNECTIONS];
    ssize_t size;
    while ((size = receive(front, records, sizeof records)) > 0) {
        for (size_t i = 0; i < (size_t)size / sizeof *records; i++) {
            float(*tensors)[ELEMENTS] = records[i].tensors;
            for (size_t at = 0; at < ELEMENTS; at++) {
                float a = tensors[0][at], b = tensors[1][at];
                tensors[0][at] = a + b;
                tensors[1][at] = a - b;
            }
        }
        if (send(front, records, (size_t)size, MSG_NOSIGNAL) != size)
            return;
    }
}

/* Everything from here on is the front's. */
static bool watch(const front_t *front, int fd, uint32_t number) {
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = number};
    return epoll_ctl(front->poll, EPOLL_CTL_ADD, fd, &event) == 0;
}

static void end(connection_t *connection) {
    close(connection->fd); /* which takes it out of the epoll as well */
    connection->fd = -1;
    connection->received = connection->known = 0;
}

static void join(front_t *front) {
    int fd = accept4(front->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK), on = 1;
    uint32_t number = 0;
    while (number < CONNECTIONS && (front->connections[number].fd >= 0 || front->connections[number].asked))
        number++;
    if (fd < 0)
        return; /* the client has left again */
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (number < CONNECTIONS && watch(front, fd, number))
        front->connections[number].fd = fd;
    else
        close(fd);
}

/* The number in a header field; 0: there is no such field. A negative one is larger than any bound. */
static size_t field(const char *head, const char *head_end, const char *name) {
    const char *found = strcasestr(head, name);
    return found != NULL && found < head_end ? strtoul(found + strlen(name), NULL, 10) : 0;
}

/* Sends an answer that was made before, with the count of now. */
static bool answer_other(const front_t *front, int fd, const answer_t *prepared) {
    char text[ANSWER_SIZE], count[COUNTER_SIZE + 1], *at = text;
    memcpy(text, prepared->text, prepared->size);
    snprintf(count, sizeof count, "%*llu", (int)COUNTER_SIZE, front->answered);
    while ((at = memmem(at, (size_t)(text + prepared->size - at), COUNTER, COUNTER_SIZE)) != NULL)
        memcpy(at, count, COUNTER_SIZE);
    return send(fd, text, prepared->size, MSG_NOSIGNAL) == (ssize_t)prepared->size;
}

/* Reads a request that does not begin like the last one, once it is there: inference becomes the last one, others are answered.
 * false: the connection has to end. */
static bool learn(front_t *front, connection_t *connection) {
    char *request = connection->request;
    request[connection->received] = 0;
    const char *body = strstr(request, "\r\n\r\n");
    if (body == NULL)
        return true;
    body += 4;
    size_t head_size = (size_t)(body - request), length = field(request, body, "\r\nContent-Length:");
    if (length > REQUEST_SIZE - head_size)
        return false;
    if (connection->received < head_size + length)
        return true;
    const answer_t *found = front->answers, *last = found + front->answer_count;
    while (found < last && strncmp(request, found->request, found->request_size) != 0)
        found++;
    if (found == front->answers) {
        size_t json_size = field(request, body, "\r\nInference-Header-Content-Length:");
        if (length < TENSORS_SIZE || json_size != length - TENSORS_SIZE)
            return false; /* these are not the tensors that the worker can read */
        connection->known = head_size + json_size;
        memcpy(connection->head, request, connection->known);
        return true;
    }
    static const answer_t unknown = {.size = 45, .text = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"};
    bool whole = connection->received == head_size + length;
    connection->received = 0;
    return whole && answer_other(front, connection->fd, found < last ? found : &unknown);
}

/* Whether what came is the beginning of a request like the last one, or all of it. Its length is then the same: it is in the head. */
static bool known(const connection_t *connection) {
    size_t size = connection->received < connection->known ? connection->received : connection->known;
    return size > 0 && memcmp(connection->request, connection->head, size) == 0;
}

/* Does with a request what is to be done, once it is there. false: the connection has to end. */
static bool take(front_t *front, uint32_t number) {
    connection_t *connection = &front->connections[number];
    if (!known(connection) && !learn(front, connection))
        return false;
    if (known(connection) && connection->received >= connection->known + TENSORS_SIZE) {
        if (connection->received > connection->known + TENSORS_SIZE)
            return false; /* the next one, too early */
        record_t *record = &front->waiting[front->waiting_count++];
        record->connection = number;
        memcpy(record->tensors, connection->request + connection->known, TENSORS_SIZE);
        connection->asked = true;
        connection->received = 0;
    }
    return connection->received < REQUEST_SIZE;
}

static void readable(front_t *front, uint32_t number) {
    connection_t *connection = &front->connections[number];
    if (connection->fd < 0)
        return; /* it ended earlier in this turn */
    size_t room = REQUEST_SIZE - connection->received;
    ssize_t size = recv(connection->fd, connection->request + connection->received, room, 0);
    if (size < 0 && errno == EAGAIN)
        return; /* the event was for whoever had this place before */
    if (size > 0)
        connection->received += (size_t)size;
    if (size <= 0 || connection->asked || !take(front, number))
        end(connection);
}

/* Sends what the worker answered. false: the worker is gone. */
static bool answer(front_t *front) {
    static char text[ANSWER_SIZE + TENSORS_SIZE];
    record_t records[CONNECTIONS];
    size_t head_size = front->answers[0].size, whole = head_size + TENSORS_SIZE;
    memcpy(text, front->answers[0].text, head_size);
    ssize_t size = recv(front->worker, records, sizeof records, 0);
    for (ssize_t i = 0; i < size / (ssize_t)sizeof *records; i++) {
        connection_t *connection = &front->connections[records[i].connection];
        connection->asked = false;
        if (connection->fd < 0)
            continue; /* the client has left */
        memcpy(text + head_size, records[i].tensors, TENSORS_SIZE);
        front->answered++;
        if (send(connection->fd, text, whole, MSG_NOSIGNAL) != (ssize_t)whole)
            end(connection);
    }
    return size > 0;
}

static int wait_events(const front_t *front, struct epoll_event *events) {
    for (int64_t until = spin_us ? now_us() + spin_us : 0; until != 0 && now_us() < until; sched_yield()) {
        int count = epoll_wait(front->poll, events, EVENTS, 0);
        if (count != 0)
            return count;
    }
    return epoll_wait(front->poll, events, EVENTS, -1);
}

/* Until it is told to end. false: something that it needs has ended before. */
static bool serve(front_t *front) {
    struct epoll_event events[EVENTS];
    for (;;) {
        int count = wait_events(front, events);
        if (count < 0 && errno != EINTR)
            return false;
        for (int i = 0; i < count; i++) {
            uint32_t number = events[i].data.u32;
            if (number == SIGNALS)
                return true;
            if (number == LISTENER)
                join(front);
            else if (number != WORKER)
                readable(front, number);
            else if (!answer(front))
                return false;
        }
        /* It fits always: all places together have one request each with the worker. */
        size_t size = front->waiting_count * sizeof *front->waiting;
        if (size > 0 && send(front->worker, front->waiting, size, MSG_NOSIGNAL) != (ssize_t)size)
            return false;
        front->waiting_count = 0;
    }
}

/* Reads FILE. false: it is not as described above, or larger than there is room. */
static bool load(front_t *front, const char *name) {
    static char text[ANSWERS * ANSWER_SIZE + 1];
    FILE *file = fopen(name, "r");
    if (file == NULL)
        return false;
    const char *at = text, *end = text + fread(text, 1, sizeof text - 1, file);
    bool whole = feof(file) != 0;
    fclose(file);
    while (whole && at < end && front->answer_count < ANSWERS) {
        answer_t *found = &front->answers[front->answer_count++];
        int request_size = 0, line_size = 0;
        if (sscanf(at, "%*s %*s %n%zu%n", &request_size, &found->size, &line_size) != 1 || at[line_size] != '\n')
            return false;
        found->request = at;
        found->request_size = (size_t)request_size;
        found->text = at + line_size + 1;
        if (found->size > ANSWER_SIZE || found->size > (size_t)(end - found->text))
            return false;
        at = found->text + found->size;
    }
    return whole && at == end && front->answer_count > 0;
}

/* The socket that listens on a port, which it says; -1: there is none. */
static int listener(uint16_t port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1;
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
        bind(fd, (struct sockaddr *)&address, size) != 0 || listen(fd, CONNECTIONS) != 0 ||
        getsockname(fd, (struct sockaddr *)&address, &size) != 0)
        return -1;
    printf("listening on %d\n", ntohs(address.sin_port));
    return fflush(stdout) == 0 ? fd : -1;
}

int main(int count, char **words) {
    static front_t front;
    long port = -1;
    if (count != 7 || strcmp(words[1], "--port") != 0 || strcmp(words[3], "--spin-us") != 0 ||
        strcmp(words[5], "--answers") != 0 || (port = strtol(words[2], NULL, 10)) < 0 || port > UINT16_MAX ||
        (spin_us = strtol(words[4], NULL, 10)) < 0) {
        fprintf(stderr, "native_chain --port P --spin-us N --answers FILE\n");
        return 2;
    }
    if (!load(&front, words[6])) {
        fprintf(stderr, "native_chain: %s does not hold %d answers of %d bytes at most\n", words[6], ANSWERS, ANSWER_SIZE);
        return EXIT_FAILURE;
    }
    for (size_t i = 0; i < CONNECTIONS; i++)
        front.connections[i].fd = -1;
    /* Blocked in the worker as well: a signal to the whole group must not end it before the front. */
    sigset_t ending;
    sigemptyset(&ending);
    sigaddset(&ending, SIGTERM);
    sigaddset(&ending, SIGINT);
    sigprocmask(SIG_BLOCK, &ending, NULL);
    int pair[2];
    pid_t child = socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0 ? fork() : -1;
    if (child == 0) {
        close(pair[0]); /* or it would not see the front end */
        work(pair[1]);
        return EXIT_SUCCESS;
    }
    int signals = signalfd(-1, &ending, SFD_CLOEXEC);
    front.poll = epoll_create1(EPOLL_CLOEXEC);
    front.worker = pair[0];
    if (child < 0 || signals < 0 || front.poll < 0 || (front.listener = listener((uint16_t)port)) < 0 ||
        !watch(&front, front.listener, LISTENER) || !watch(&front, front.worker, WORKER) || !watch(&front, signals, SIGNALS)) {
        perror("native_chain");
        return EXIT_FAILURE;
    }
    close(pair[1]);
    bool told = serve(&front);
    close(front.worker);
    waitpid(child, NULL, 0);
    return told ? EXIT_SUCCESS : EXIT_FAILURE;
}
