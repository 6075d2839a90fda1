/* Reads records for test_lane_header.py. Standard input has frames: a byte, the size as a u32 of this host, and a datagram.
 *
 *     w  to a worker: each record that its part in C reads, by tensord_wire.h     a  to a client: each answer, by tensord_lane.h
 *
 * What was read is a line: records with a semicolon behind each, or "-" alone where the datagram was refused. */

#include <tensord_lane.h>

static void hex(const void *content, size_t size) {
    putchar(' ');
    for (size_t i = 0; i < size; i++)
        printf("%02x", ((const unsigned char *)content)[i]);
    putchar('.');
}

static void text(tensord__text is) { hex(is.at, is.size); }

static void request(tensord__request *read) {
    const tensord__own *own = &read->own;
    printf("q %ju %ju %ju %ju %ju %ju", (uintmax_t)read->request_id, (uintmax_t)read->number, (uintmax_t)own->deadline_ns,
           (uintmax_t)own->received_ns, (uintmax_t)own->priority, (uintmax_t)own->timeout_us);
    if (own->sequence_text.at == NULL)
        printf(" %ju", (uintmax_t)own->sequence_id);
    else
        text(own->sequence_text);
    printf(" %d %d %ju %ju", own->sequence_start, own->sequence_end, (uintmax_t)own->trace, (uintmax_t)own->strikes);
    text(own->client_id);
    text(own->replace_key);
    text(own->parameter_set);
    for (uint64_t i = 0; i < read->count; i++) {
        tensord__content content = tensord__take_content(&read->contents);
        if (content.bytes != NULL)
            hex(content.bytes, content.byte_size);
        else
            printf(" %ju,%ju,%ju", (uintmax_t)content.segment, (uintmax_t)content.offset, (uintmax_t)content.byte_size);
    }
    putchar(';');
}

/* Reads a datagram; prints what is in it if ``says``. Returns whether it was refused. */
static int to_worker(const unsigned char *datagram, size_t size, int says) {
    tensord__reader from = tensord__read_from(datagram, size);
    for (uint64_t left = tensord__take_array(&from); left > 0 && !from.bad; left--) {
        uint64_t fields = tensord__take_array(&from);
        tensord__text tag = tensord__take_text(&from);
        if (tensord__is(tag, "q")) {
            tensord__request read = tensord__take_request(&from, fields);
            if (says)
                request(&read);
        } else if (tensord__is(tag, "L")) {
            tensord__take_release(&from);
            from.bad |= fields != 2;
        } else if (tensord__is(tag, "tc")) {
            tensord__take_trace_context(&from, fields);
        } else {
            from.bad = 1;
        }
    }
    return from.bad || from.at != from.end;
}

static void to_client(const unsigned char *datagram, size_t size) {
    static tensord_answer answer;
    int ends[2], wrong;
    tensord_lane *lane = (tensord_lane *)calloc(1, sizeof *lane);
    if (lane == NULL || socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends))
        exit(1);
    lane->fd = ends[0];
    lane->agreed = 1;
    send(ends[1], datagram, size, 0);
    close(ends[1]);
    while (!(wrong = tensord_receive(lane, &answer, 0))) {
        printf("c %ju %d %jd %s", (uintmax_t)answer.request_id, answer.final, (intmax_t)answer.version, answer.has_lease ? "l" : "-");
        printf(" %ju %ju %ju", (uintmax_t)answer.queue_ns, (uintmax_t)answer.compute_ns, (uintmax_t)answer.copied_byte_size);
        hex(answer.code, strlen(answer.code));
        hex(answer.message, strlen(answer.message));
        for (int i = 0; i < answer.outputs; i++) {
            const tensord_output *output = &answer.output[i];
            hex(output->name, output->name_size);
            hex(output->datatype, output->datatype_size);
            for (int j = 0; j < output->rank; j++)
                printf(" %jd", (intmax_t)output->shape[j]);
            if (output->content == NULL)
                printf(" placed");
            else
                hex(output->content, output->byte_size);
        }
        putchar(';');
    }
    if (wrong != TENSORD_ENDED)
        putchar('-');
    tensord__close_lane(lane);
}

int main(void) {
    int kind;
    uint32_t size;
    while ((kind = getchar()) != EOF && fread(&size, sizeof size, 1, stdin) == 1) {
        /* Exactly as large, so that a read beyond its end is seen. */
        unsigned char *datagram = (unsigned char *)malloc(size ? size : 1);
        if (datagram == NULL || fread(datagram, 1, size, stdin) != size)
            return 1;
        if (kind == 'a')
            to_client(datagram, size);
        else if (to_worker(datagram, size, 0))
            putchar('-');
        else
            to_worker(datagram, size, 1);
        putchar('\n');
        fflush(stdout);
        free(datagram);
    }
    return 0;
}
