/* HTTP/1.1 for the client: requests and answers are whole as the pool has them, so an answer is there when its bytes are. */

#define _GNU_SOURCE
#include "client.h"

#include <stdlib.h>
#include <string.h>

static void open_http(pool_t *pool, connection_t *connection) {
    if (pool->opening.size > 0)
        send_all(connection->fd, pool->opening.bytes, pool->opening.size);
}

static void ask_http(pool_t *pool, connection_t *connection) {
    piece_t request = pool->entries[connection->entry].request;
    send_all(connection->fd, request.bytes, request.size);
}

/* Whether an answer that nothing is known of has come whole, as its head says. */
static bool whole(connection_t *connection) {
    char *text = (char *)connection->answer;
    text[connection->size] = 0;
    char *body = strstr(text, "\r\n\r\n");
    if (body == NULL)
        return false;
    body += 4;
    const char *length = strcasestr(text, "\r\nContent-Length:");
    if (length == NULL || length > body)
        fail(connection->answer, connection->size, "an answer without its length");
    size_t size = (size_t)(body - text) + strtoul(length + 17, NULL, 10);
    if (connection->size > size || size > BUFFER_SIZE)
        fail(connection->answer, connection->size, "%zu bytes came where %zu were said", connection->size, size);
    return connection->size == size;
}

static bool read_http(pool_t *pool, connection_t *connection) {
    uint8_t *room = connection->answer + connection->size;
    size_t came = receive(connection->fd, room, BUFFER_SIZE - connection->size);
    connection->size += came;
    if (came == 0)
        return false;
    return pool->records ? whole(connection) : right(pool, connection);
}

const protocol_t http = {open_http, ask_http, read_http};
