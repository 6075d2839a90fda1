/* gRPC for the client: calls one after the other on a connection (grpc), or messages one after the other on one stream (stream).
 *
 *     opening ─▶ HEADERS, DATA ─▶ ... HEADERS, DATA, HEADERS: the trailers ─▶ the next odd stream      grpc
 *     opening with HEADERS of stream 1 ─▶ DATA ─▶ ... DATA ─▶ the next DATA                           stream
 *
 * A request is its frames; those of a call get their stream's number here. The server is told that its header blocks can index
 * nothing, so the same bytes always mean the same: while answers are recorded its blocks are noted, and from then on another
 * one is an error. What this client cannot do is refused, not guessed: padding, header blocks in several frames.
 * Source: RFC 9113; gRPC's PROTOCOL-HTTP2.md.
 */

#define _GNU_SOURCE
#include "client.h"

#include <stdlib.h>
#include <string.h>

#define HEAD_SIZE 9
#define PREFIX_SIZE 5
#define DEFAULT_WINDOW 65535
/* The opening grants the server so much on each stream and 64 MiB on the connection; a quarter of that is granted again. */
#define STREAM_WINDOW 0x7fffffff
#define GRANT (16 << 20)

enum { DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE };
enum { END_STREAM = 1, ACK = 1, END_HEADERS = 4 };
enum { INITIAL_WINDOW_SIZE = 4 };

typedef struct {
    uint32_t size;
    uint8_t kind, flags;
    uint32_t stream;
    const uint8_t *content;
} frame_t;

static uint32_t number_at(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void put_number(uint8_t *at, uint32_t number) {
    at[0] = (uint8_t)(number >> 24);
    at[1] = (uint8_t)(number >> 16);
    at[2] = (uint8_t)(number >> 8);
    at[3] = (uint8_t)number;
}

static uint32_t size_at(const uint8_t *at) {
    return (uint32_t)at[0] << 16 | (uint32_t)at[1] << 8 | at[2];
}

static void send_frame(int fd, uint8_t kind, uint8_t flags, uint32_t number, const uint8_t *content, uint32_t size) {
    uint8_t frame[HEAD_SIZE + 8] = {0, 0, (uint8_t)size, kind, flags};
    put_number(frame + 5, number);
    memcpy(frame + HEAD_SIZE, content, size);
    send_all(fd, frame, HEAD_SIZE + size);
}

static void open_grpc(pool_t *pool, connection_t *connection) {
    send_all(connection->fd, pool->opening.bytes, pool->opening.size);
    connection->window = connection->stream_window = connection->first_window = DEFAULT_WINDOW;
}

static void open_stream(pool_t *pool, connection_t *connection) {
    open_grpc(pool, connection);
    connection->stream = 1;
}

/* Sends the request as soon as the server grants its size. */
static void send_granted(pool_t *pool, connection_t *connection) {
    uint8_t frames[BUFFER_SIZE];
    piece_t request = pool->entries[connection->entry].request;
    memcpy(frames, request.bytes, request.size);
    bool calls = frames[3] == HEADERS;
    uint8_t *data = calls ? frames + HEAD_SIZE + size_at(frames) : frames;
    uint32_t size = size_at(data);
    connection->waits = size > connection->window || size > connection->stream_window;
    if (connection->waits)
        return;
    connection->window -= size;
    connection->stream_window -= size;
    put_number(frames + 5, connection->stream);
    put_number(data + 5, connection->stream);
    send_all(connection->fd, frames, request.size);
}

static void ask_grpc(pool_t *pool, connection_t *connection) {
    connection->stream = connection->stream ? connection->stream + 2 : 1;
    connection->stream_window = connection->first_window;
    send_granted(pool, connection);
}

/* A header block that the server has sent before, or whose first time is recorded. */
static void check_block(pool_t *pool, const frame_t *frame) {
    uint8_t block[BUFFER_SIZE + 1];
    const uint8_t *content = frame->content;
    uint32_t size = frame->size;
    /* What a table's size becomes is said before the first block of a connection. */
    while (size > 0 && (*content & 0xe0) == 0x20)
        content++, size--;
    block[0] = frame->flags & END_STREAM;
    memcpy(block + 1, content, size++);
    for (uint32_t i = 0; i < pool->block_count; i++)
        if (pool->blocks[i].size == size && memcmp(pool->blocks[i].bytes, block, size) == 0)
            return;
    if (!pool->records || pool->block_count == BLOCKS)
        fail(block, size, "the server sends headers that it did not send before");
    uint8_t *copy = malloc(size);
    memcpy(copy, block, size);
    pool->blocks[pool->block_count++] = (piece_t){copy, size};
}

static void take_data(connection_t *connection, const frame_t *frame) {
    if (frame->size > BUFFER_SIZE - connection->size || (frame->flags & ~END_STREAM))
        fail(frame->content, frame->size, "DATA with flags %u and %u bytes", frame->flags, frame->size);
    memcpy(connection->answer + connection->size, frame->content, frame->size);
    connection->size += frame->size;
    connection->ungranted += frame->size;
    if (connection->ungranted >= GRANT) {
        uint8_t granted[4];
        put_number(granted, connection->ungranted);
        send_frame(connection->fd, WINDOW_UPDATE, 0, 0, granted, sizeof granted);
        send_frame(connection->fd, WINDOW_UPDATE, 0, connection->stream, granted, sizeof granted);
        connection->ungranted = 0;
    }
}

static void take_settings(connection_t *connection, const frame_t *frame) {
    for (const uint8_t *at = frame->content; at + 6 <= frame->content + frame->size; at += 6)
        if (at[0] == 0 && at[1] == INITIAL_WINDOW_SIZE) {
            connection->stream_window += number_at(at + 2) - connection->first_window;
            connection->first_window = number_at(at + 2);
        }
    send_frame(connection->fd, SETTINGS, ACK, 0, frame->content, 0);
}

/* Does what a frame wants. true: the call of this connection has ended with it. */
static bool take(pool_t *pool, connection_t *connection, const frame_t *frame) {
    bool ours = frame->stream == connection->stream;
    if (frame->kind == GOAWAY || ((frame->kind == DATA || frame->kind == HEADERS) && !ours))
        fail(frame->content, frame->size, "frame of kind %u on stream %u, in %u", frame->kind, frame->stream, connection->stream);
    if (frame->kind == RST_STREAM && ours)
        fail(NULL, 0, "the call was reset with error %u", number_at(frame->content));
    if (frame->kind == HEADERS) {
        if ((frame->flags & ~END_STREAM) != END_HEADERS)
            fail(frame->content, frame->size, "HEADERS with flags %u", frame->flags);
        check_block(pool, frame);
        return frame->flags & END_STREAM;
    }
    if (frame->kind == DATA)
        take_data(connection, frame);
    else if (frame->kind == SETTINGS && !(frame->flags & ACK))
        take_settings(connection, frame);
    else if (frame->kind == PING && !(frame->flags & ACK) && frame->size == 8)
        send_frame(connection->fd, PING, ACK, 0, frame->content, 8);
    else if (frame->kind == WINDOW_UPDATE && frame->stream == 0)
        connection->window += number_at(frame->content);
    else if (frame->kind == WINDOW_UPDATE && ours)
        connection->stream_window += number_at(frame->content);
    if (connection->waits)
        send_granted(pool, connection);
    return false;
}

/* Takes the whole frames of what has come. true: the stream has ended with one. */
static bool take_frames(pool_t *pool, connection_t *connection) {
    uint8_t *at = connection->frames;
    connection->frames_size += receive(connection->fd, at + connection->frames_size, BUFFER_SIZE - connection->frames_size);
    const uint8_t *end = at + connection->frames_size;
    bool ended = false;
    while (end - at >= HEAD_SIZE && (size_t)(end - at - HEAD_SIZE) >= size_at(at)) {
        frame_t frame = {size_at(at), at[3], at[4], number_at(at + 5) & STREAM_WINDOW, at + HEAD_SIZE};
        ended |= take(pool, connection, &frame);
        at += HEAD_SIZE + frame.size;
    }
    connection->frames_size = (size_t)(end - at);
    memmove(connection->frames, at, connection->frames_size);
    if (connection->frames_size == BUFFER_SIZE)
        fail(at, HEAD_SIZE, "a frame of %u bytes", size_at(at));
    return ended;
}

/* Whether a message that nothing is known of has come whole. */
static bool whole(const connection_t *connection) {
    if (connection->size < PREFIX_SIZE)
        return false;
    size_t size = PREFIX_SIZE + (size_t)number_at(connection->answer + 1);
    if (connection->size > size || connection->answer[0])
        fail(connection->answer, connection->size, "no single message of its stated length, which is %zu", size);
    return connection->size == size;
}

static bool complete(const pool_t *pool, const connection_t *connection) {
    return pool->records ? whole(connection) : right(pool, connection);
}

static bool read_grpc(pool_t *pool, connection_t *connection) {
    if (!take_frames(pool, connection))
        return false;
    /* While recording an error has no message: who reads the blocks sees it. */
    if (!complete(pool, connection) && !pool->records)
        fail(connection->answer, connection->size, "the call ended before its answer");
    return true;
}

static bool read_stream(pool_t *pool, connection_t *connection) {
    if (take_frames(pool, connection))
        fail(connection->answer, connection->size, "the server ended the stream");
    return complete(pool, connection);
}

const protocol_t grpc = {open_grpc, ask_grpc, read_grpc}, stream = {open_stream, send_granted, read_stream};
