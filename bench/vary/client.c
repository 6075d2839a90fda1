/* A closed-loop client that sends other bytes each time and costs a few microseconds a request: one thread, one epoll.
 *
 *     client --protocol http|grpc|stream --address IP:PORT --connections N --pool FILE --record FILE
 *     client --protocol http|grpc|stream --address IP:PORT --connections N --pool FILE --seconds S [--new]
 *
 * Each connection sends a request of the pool, waits for its whole answer, compares every byte of it with the one that the pool has,
 * and sends the next: the connections begin at different places of the pool and go through it in order, round and round. Where
 * requests of a pool belong together, one connection sends them one after the other, also when the time is over; then it takes the
 * next ones that no other connection has.
 * The clock starts when so many answers have come as there are connections. With --record each request is asked once and what was
 * answered is written down; who calls (client.py) decides whether that is right. With --new each request has a connection of its
 * own, which counts to its time. After S seconds nothing more is sent, and what is on its way is waited for, checked and not
 * counted; it is lost when a minute passes without any answer. A minute without any before S seconds are over, or the first wrong
 * answer, ends it with status 1.
 *
 *     pool:      u32 entries | u32 size, opening | u32 blocks, { u32 size, block } |
 *                { u32 size, request | u32 size, answer | u32 rounded, f32, f32 | u32 goes on } all numbers little-endian
 *     recorded:  u32 blocks, { u32 size, block } | { u32 size, answer }
 *
 * Prints JSON: answers, total with those that were not counted, lost, seconds, p50_us, p99_us, worst_us, and client_us, the processor time
 * of its own for each answer.
 */

#define _GNU_SOURCE
#include "client.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define EVENTS 512
#define PATIENCE_S 60
/* Where each request has a connection of its own they come from so many addresses in turn: one address has 28,000 ports, each of
 * which rests for a second or two, and beyond 14,000 a second it is the search for a free one that is measured. */
#define SOURCES 8

typedef struct {
    const protocol_t *protocol;
    pool_t pool;
    struct sockaddr_in address;
    connection_t *connections;
    uint32_t connection_count, in_flight, asked, opened;
    bool renews;
    int poll;
    /* So many answers are not counted: until each connection has had one. Then the clock starts. */
    uint32_t to_warm;
    int64_t length_ns, end_ns;
    double used_us;
    /* All of them, whether counted or not. */
    size_t total;
    uint32_t *latencies_us;
    size_t latency_count, latency_room;
} client_t;

void fail(const uint8_t *said, size_t size, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    if (size > 0)
        fputs(": ", stderr);
    for (size_t i = 0; i < size && i < 400; i++)
        fprintf(stderr, isprint(said[i]) ? "%c" : "\\x%02x", said[i]);
    fputc('\n', stderr);
    exit(EXIT_FAILURE);
}

static void *allocated(size_t size) {
    void *room = malloc(size);
    if (room == NULL)
        fail(NULL, 0, "no memory for %zu bytes", size);
    return room;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void send_all(int fd, const void *bytes, size_t size) {
    if (send(fd, bytes, size, MSG_NOSIGNAL) != (ssize_t)size)
        fail(NULL, 0, "the server does not take a request of %zu bytes: %s", size, strerror(errno));
}

size_t receive(int fd, void *room, size_t size) {
    ssize_t received = recv(fd, room, size, MSG_DONTWAIT);
    if (received == 0 || (received < 0 && errno != EAGAIN && errno != EINTR))
        fail(NULL, 0, "the server hung up: %s", received == 0 ? "end of stream" : strerror(errno));
    return received > 0 ? (size_t)received : 0;
}

static bool nearly(const entry_t *entry, const uint8_t *one, const uint8_t *other) {
    for (size_t at = 0; at + sizeof(float) <= entry->rounded; at += sizeof(float)) {
        float a, b;
        memcpy(&a, one + at, sizeof a);
        memcpy(&b, other + at, sizeof b);
        if (!(fabsf(a - b) <= entry->absolute + entry->relative * fabsf(b)))
            return false;
    }
    return true;
}

bool right(const pool_t *pool, const connection_t *connection) {
    const entry_t *entry = &pool->entries[connection->entry];
    size_t size = connection->size, whole = entry->answer.size, exact = whole - entry->rounded;
    if (size > whole || memcmp(connection->answer, entry->answer.bytes, size < exact ? size : exact) != 0 ||
        (size == whole && !nearly(entry, connection->answer + exact, entry->answer.bytes + exact)))
        fail(connection->answer, size, "wrong answer to request %u, %zu bytes of %zu", connection->entry, size, whole);
    return size == whole;
}

/* The processor time of this process. */
static double used_us(void) {
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return 1e6 * (double)used.tv_sec + 1e-3 * (double)used.tv_nsec;
}

static void open_connection(client_t *client, connection_t *connection) {
    int on = 1;
    struct timeval patience = {.tv_sec = PATIENCE_S};
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    /* All of 127.0.0.0/8 is this host; to a server elsewhere the kernel chooses. */
    struct sockaddr_in from = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    if (client->renews && client->address.sin_addr.s_addr == htonl(INADDR_LOOPBACK))
        from.sin_addr.s_addr = htonl(INADDR_LOOPBACK + client->opened++ % SOURCES);
    connection->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connection->fd < 0 || setsockopt(connection->fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on) != 0 ||
        bind(connection->fd, (struct sockaddr *)&from, sizeof from) != 0 ||
        connect(connection->fd, (struct sockaddr *)&client->address, sizeof client->address) != 0 ||
        setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0 ||
        setsockopt(connection->fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) != 0 ||
        epoll_ctl(client->poll, EPOLL_CTL_ADD, connection->fd, &event) != 0)
        fail(NULL, 0, "no connection: %s", strerror(errno));
    client->protocol->open(&client->pool, connection);
}

static void ask(client_t *client, connection_t *connection) {
    connection->began_ns = now_ns();
    client->in_flight++;
    client->protocol->ask(&client->pool, connection);
}

static void ask_anew(client_t *client, connection_t *connection) {
    close(connection->fd);
    connection->began_ns = now_ns();
    client->in_flight++;
    open_connection(client, connection);
    client->protocol->ask(&client->pool, connection);
}

static void count_latency(client_t *client, int64_t nanoseconds) {
    if (client->latency_count == client->latency_room) {
        client->latency_room = client->latency_room ? 2 * client->latency_room : 1 << 16;
        client->latencies_us = realloc(client->latencies_us, client->latency_room * sizeof *client->latencies_us);
        if (client->latencies_us == NULL)
            fail(NULL, 0, "no memory for %zu latencies", client->latency_room);
    }
    client->latencies_us[client->latency_count++] = (uint32_t)(nanoseconds / 1000);
}

/* The connection takes the next requests that belong together, and that no other connection has. */
static void take_next(client_t *client, connection_t *connection) {
    pool_t *pool = &client->pool;
    connection->first = client->asked;
    for (uint32_t looked = 0; pool->entries[connection->first].taken; looked++) {
        if (looked == pool->count)
            fail(NULL, 0, "a pool of %u requests has nothing for each of %u connections", pool->count, client->connection_count);
        while (pool->entries[connection->first++].goes_on)
            ;
        connection->first %= pool->count;
    }
    connection->entry = client->asked = connection->first;
    pool->entries[connection->first].taken = true;
    while (pool->entries[client->asked++].goes_on)
        ;
    if (!pool->records)
        client->asked %= pool->count;
}

/* Keeps an answer, and asks what was not asked yet. */
static void record(client_t *client, connection_t *connection) {
    uint8_t *copy = allocated(connection->size + 1);
    memcpy(copy, connection->answer, connection->size);
    client->pool.entries[connection->entry].answer = (piece_t){copy, (uint32_t)connection->size};
    connection->size = 0;
    bool goes_on = client->pool.entries[connection->entry].goes_on;
    if (goes_on || client->asked < client->pool.count) {
        if (goes_on)
            connection->entry++;
        else
            take_next(client, connection);
        ask(client, connection);
    }
}

/* Counts an answer, and asks the next request unless the time is over. */
static void go_on(client_t *client, connection_t *connection) {
    int64_t now = now_ns();
    connection->size = 0;
    client->total++;
    if (client->to_warm > 0 && --client->to_warm == 0) {
        client->end_ns = now + client->length_ns;
        client->used_us = used_us();
    } else if (client->to_warm == 0 && now < client->end_ns)
        count_latency(client, now - connection->began_ns);
    bool goes_on = client->pool.entries[connection->entry].goes_on;
    if (client->pool.together && !goes_on)
        client->pool.entries[connection->first].taken = false;
    if (client->to_warm == 0 && now >= client->end_ns && !goes_on)
        return;
    if (client->pool.together && !goes_on)
        take_next(client, connection);
    else
        connection->entry = (connection->entry + 1) % client->pool.count;
    (client->renews ? ask_anew : ask)(client, connection);
}

static void run(client_t *client) {
    uint32_t count = client->to_warm = client->connection_count;
    for (uint32_t i = 0; i < count; i++)
        open_connection(client, &client->connections[i]);
    for (uint32_t i = 0; i < count; i++) {
        connection_t *connection = &client->connections[i];
        bool takes = client->pool.records || client->pool.together;
        if (client->pool.records && client->asked == client->pool.count)
            break; /* there are more connections than requests that do not belong together */
        if (takes)
            take_next(client, connection);
        else
            connection->entry = (uint32_t)((uint64_t)i * client->pool.count / count);
        ask(client, connection);
    }
    while (client->in_flight > 0) {
        struct epoll_event events[EVENTS];
        int found = epoll_wait(client->poll, events, EVENTS, PATIENCE_S * 1000);
        if (found < 0 && errno != EINTR)
            fail(NULL, 0, "epoll: %s", strerror(errno));
        if (found == 0 && client->latency_count > 0 && now_ns() >= client->end_ns)
            return; /* what is still missing is lost, and reported */
        if (found == 0)
            fail(NULL, 0, "no answer within %d s, %u requests wait", PATIENCE_S, client->in_flight);
        for (int i = 0; i < found; i++) {
            connection_t *connection = events[i].data.ptr;
            if (client->protocol->read(&client->pool, connection)) {
                client->in_flight--;
                (client->pool.records ? record : go_on)(client, connection);
            }
        }
    }
}

static int by_size(const void *one, const void *other) {
    uint32_t a = *(const uint32_t *)one, b = *(const uint32_t *)other;
    return a < b ? -1 : a > b;
}

static void report(client_t *client, double seconds) {
    double used = used_us() - client->used_us;
    size_t count = client->latency_count;
    if (count == 0)
        fail(NULL, 0, "no answer within %g s", seconds);
    qsort(client->latencies_us, count, sizeof *client->latencies_us, by_size);
    printf("{\"answers\": %zu, \"total\": %zu, \"lost\": %u, \"seconds\": %g, \"p50_us\": %u, \"p99_us\": %u, \"worst_us\": %u, \"client_us\": %.2f}\n", count,
           client->total, client->in_flight, seconds, client->latencies_us[count / 2], client->latencies_us[count * 99 / 100], client->latencies_us[count - 1],
           used / (double)count);
}

/* The file, and how far it was read. */
typedef struct {
    const uint8_t *at, *end;
} reader_t;

static uint32_t read_number(reader_t *reader) {
    uint32_t number;
    if ((size_t)(reader->end - reader->at) < sizeof number)
        fail(NULL, 0, "the pool is cut off");
    memcpy(&number, reader->at, sizeof number);
    reader->at += sizeof number;
    return number;
}

static float read_float(reader_t *reader) {
    uint32_t bits = read_number(reader);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static piece_t read_piece(reader_t *reader) {
    uint32_t size = read_number(reader);
    if ((size_t)(reader->end - reader->at) < size || size > BUFFER_SIZE)
        fail(NULL, 0, "the pool is cut off, or a piece of %u bytes is larger than %d", size, BUFFER_SIZE);
    reader->at += size;
    return (piece_t){reader->at - size, size};
}

static void load(pool_t *pool, const char *name) {
    FILE *file = fopen(name, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0)
        fail(NULL, 0, "%s: %s", name, strerror(errno));
    size_t size = (size_t)ftell(file);
    uint8_t *bytes = allocated(size + 1);
    rewind(file);
    if (fread(bytes, 1, size, file) != size)
        fail(NULL, 0, "%s cannot be read", name);
    fclose(file);
    reader_t reader = {bytes, bytes + size};
    pool->count = read_number(&reader);
    pool->opening = read_piece(&reader);
    pool->block_count = read_number(&reader);
    if (pool->count == 0 || pool->count > size || pool->block_count > BLOCKS)
        fail(NULL, 0, "a pool of %u requests and %u blocks", pool->count, pool->block_count);
    for (uint32_t i = 0; i < pool->block_count; i++)
        pool->blocks[i] = read_piece(&reader);
    pool->entries = allocated(pool->count * sizeof *pool->entries);
    for (uint32_t i = 0; i < pool->count; i++) {
        entry_t *entry = &pool->entries[i];
        entry->request = read_piece(&reader);
        entry->answer = read_piece(&reader);
        entry->rounded = read_number(&reader);
        entry->absolute = read_float(&reader);
        entry->relative = read_float(&reader);
        entry->goes_on = read_number(&reader) != 0;
        entry->taken = false;
        if (entry->goes_on && i + 1 == pool->count)
            fail(NULL, 0, "the last request of the pool goes on");
        pool->together |= entry->goes_on;
        if (entry->rounded > entry->answer.size || (!pool->records && entry->answer.size == 0))
            fail(NULL, 0, "request %u has no answer, or one smaller than its tensors", i);
    }
}

static void write_piece(FILE *file, piece_t piece) {
    fwrite(&piece.size, sizeof piece.size, 1, file);
    fwrite(piece.bytes, 1, piece.size, file);
}

static void write_recorded(const pool_t *pool, const char *name) {
    FILE *file = fopen(name, "wb");
    if (file == NULL)
        fail(NULL, 0, "%s: %s", name, strerror(errno));
    fwrite(&pool->block_count, sizeof pool->block_count, 1, file);
    for (uint32_t i = 0; i < pool->block_count; i++)
        write_piece(file, pool->blocks[i]);
    for (uint32_t i = 0; i < pool->count; i++)
        write_piece(file, pool->entries[i].answer);
    if (ferror(file) || fclose(file) != 0)
        fail(NULL, 0, "%s cannot be written", name);
}

static const protocol_t *protocol_of(const char *name) {
    return strcmp(name, "http") == 0 ? &http : strcmp(name, "grpc") == 0 ? &grpc : strcmp(name, "stream") == 0 ? &stream : NULL;
}

static bool address_of(char *text, struct sockaddr_in *address) {
    char *colon = strrchr(text, ':');
    if (colon == NULL)
        return false;
    *colon = 0;
    *address = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(colon + 1))};
    return inet_pton(AF_INET, text, &address->sin_addr) == 1;
}

int main(int count, char **words) {
    static client_t client;
    enum { PROTOCOL, ADDRESS, CONNECTIONS, POOL, RECORD, SECONDS, NEW, OPTIONS };
    static const struct option options[] = {
        {"protocol", required_argument, NULL, PROTOCOL}, {"address", required_argument, NULL, ADDRESS},
        {"connections", required_argument, NULL, CONNECTIONS}, {"pool", required_argument, NULL, POOL},
        {"record", required_argument, NULL, RECORD}, {"seconds", required_argument, NULL, SECONDS},
        {"new", no_argument, NULL, NEW}, {0}};
    char *said[OPTIONS] = {0};
    for (int option; (option = getopt_long(count, words, "", options, NULL)) != -1;) {
        if (option >= OPTIONS)
            return 2;
        said[option] = option == NEW ? "" : optarg;
    }
    if (!said[PROTOCOL] || !said[ADDRESS] || !said[CONNECTIONS] || !said[POOL] || !said[RECORD] == !said[SECONDS] ||
        (client.protocol = protocol_of(said[PROTOCOL])) == NULL || !address_of(said[ADDRESS], &client.address) ||
        atoi(said[CONNECTIONS]) < 1 || (said[NEW] && client.protocol != &http))
        fail(NULL, 0, "client --protocol http|grpc|stream --address IP:PORT --connections N --pool FILE "
                      "(--record FILE | --seconds S [--new, of http])");
    client.pool.records = said[RECORD] != NULL;
    client.renews = said[NEW] != NULL;
    load(&client.pool, said[POOL]);
    client.connection_count = (uint32_t)atoi(said[CONNECTIONS]);
    if (client.pool.records && client.connection_count > client.pool.count)
        client.connection_count = client.pool.count;
    struct rlimit descriptors;
    getrlimit(RLIMIT_NOFILE, &descriptors);
    descriptors.rlim_cur = descriptors.rlim_max;
    setrlimit(RLIMIT_NOFILE, &descriptors);
    client.poll = epoll_create1(EPOLL_CLOEXEC);
    client.connections = allocated(client.connection_count * sizeof *client.connections);
    for (uint32_t i = 0; i < client.connection_count; i++)
        client.connections[i] = (connection_t){.fd = -1, .answer = allocated(BUFFER_SIZE + 1), .frames = allocated(BUFFER_SIZE)};
    double seconds = said[SECONDS] ? atof(said[SECONDS]) : 0;
    client.length_ns = (int64_t)(seconds * 1e9);
    run(&client);
    if (client.pool.records)
        write_recorded(&client.pool, said[RECORD]);
    else
        report(&client, seconds);
    return EXIT_SUCCESS;
}
