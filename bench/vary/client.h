/* What the parts of the client share: the pool, a connection, and the protocols' three functions. client.c says what it does. */

#ifndef VARY_CLIENT_H
#define VARY_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Largest answer, and what HTTP/2 puts before it; of requests pools.py keeps to as much. */
#define BUFFER_SIZE (64 << 10)
#define BLOCKS 64

typedef struct {
    const uint8_t *bytes;
    uint32_t size;
} piece_t;

typedef struct {
    piece_t request;
    /* What the server answered when each was asked for the first time, and was found right. Empty while that is recorded. */
    piece_t answer;
    /* So many of its last bytes are FP32 that may differ a little: a model that computes several requests together rounds
     * differently with each number of them. By so much, and by this part of the value. */
    uint32_t rounded;
    float absolute, relative;
    /* The entry behind it is to be asked next, by whoever asked this one. Never of the last one. */
    bool goes_on;
    /* Of the first of those that belong together: a connection has them. */
    bool taken;
} entry_t;

typedef struct {
    entry_t *entries;
    uint32_t count;
    /* Sent once on each connection. */
    piece_t opening;
    /* gRPC: the header blocks that the server may send, each behind a byte that says whether it ends the stream. */
    piece_t blocks[BLOCKS];
    uint32_t block_count;
    /* Whether any requests belong together. */
    bool together;
    bool records;
} pool_t;

typedef struct {
    int fd;
    /* The entry that is asked, and when. */
    uint32_t entry;
    /* Of what belongs together with it: the first. */
    uint32_t first;
    int64_t began_ns;
    /* What came of its answer. */
    uint8_t *answer;
    size_t size;
    /* From here on HTTP/2's: the beginning of a frame, the last stream, whether a stream is all there is, what may still be sent
     * on the connection and on the stream, what a new stream begins with, what was received since the last grant, and whether the
     * request waits for a grant of the server's. */
    uint8_t *frames;
    size_t frames_size;
    uint32_t stream;
    int64_t window, stream_window, first_window;
    uint32_t ungranted;
    bool waits;
} connection_t;

typedef struct {
    void (*open)(pool_t *pool, connection_t *connection);
    void (*ask)(pool_t *pool, connection_t *connection);
    /* Takes what has come. true: the answer is there, whole and right. Whatever is wrong ends the program. */
    bool (*read)(pool_t *pool, connection_t *connection);
} protocol_t;

extern const protocol_t http, grpc, stream;

/* Ends the program with a sentence on standard error, and the beginning of what the server has said. */
_Noreturn void fail(const uint8_t *said, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));
void send_all(int fd, const void *bytes, size_t size);
/* How much came; ends the program when the server has hung up. */
size_t receive(int fd, void *room, size_t size);
/* Whether what came is the whole answer: true, and no less than that. Wrong bytes end the program. */
bool right(const pool_t *pool, const connection_t *connection);

#endif
