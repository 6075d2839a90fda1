/* Reads what comes over lanes and the clients' socket, for test_lane_header.py and tests/fuzz. Standard input has frames: a byte, the size as
 * a u32 of this host, and so many bytes.
 *
 *     w  a datagram's records to a worker, those that its part in C reads, by tensord_wire.h
 *     a  a datagram to a client: each answer, by tensord_lane.h        p  datagrams to a client, each behind its size as a big-endian u16
 *     j  the daemon's JSON: the integer "lane", whether "new" is true, and where the value ends
 *
 * What was read is a line: records with a semicolon behind each, or "-" alone where the datagram was refused. */

#include <tensord_lane.h>

/* Where ``read_records`` writes. */
static FILE *out;

static void hex(const void *content, size_t size) {
    fputc(' ', out);
    for (size_t i = 0; i < size; i++)
        fprintf(out, "%02x", ((const unsigned char *)content)[i]);
    fputc('.', out);
}

static void text(tensord__text is) { hex(is.at, is.size); }

static void request(tensord__request *read) {
    const tensord__own *own = &read->own;
    fprintf(out, "q %ju %ju %ju %ju %ju %ju", (uintmax_t)read->request_id, (uintmax_t)read->number, (uintmax_t)own->deadline_ns,
           (uintmax_t)own->received_ns, (uintmax_t)own->priority, (uintmax_t)own->timeout_us);
    if (own->sequence_text.at == NULL)
        fprintf(out, " %ju", (uintmax_t)own->sequence_id);
    else
        text(own->sequence_text);
    fprintf(out, " %d %d %ju %ju", own->sequence_start, own->sequence_end, (uintmax_t)own->trace, (uintmax_t)own->strikes);
    text(own->client_id);
    text(own->replace_key);
    text(own->parameter_set);
    for (uint64_t i = 0; i < read->count; i++) {
        tensord__content content = tensord__take_content(&read->contents);
        if (content.bytes != NULL)
            hex(content.bytes, content.byte_size);
        else
            fprintf(out, " %ju,%ju,%ju", (uintmax_t)content.segment, (uintmax_t)content.offset, (uintmax_t)content.byte_size);
    }
    fputc(';', out);
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

/* Reads datagrams of a lane: all bytes are one, or (``pieces``) each is behind its size. */
static void to_client(const unsigned char *bytes, size_t size, int pieces) {
    static tensord_answer answer;
    int ends[2], wrong;
    tensord_lane *lane = (tensord_lane *)calloc(1, sizeof *lane);
    if (lane == NULL || socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends))
        exit(1);
    lane->fd = ends[0];
    lane->agreed = 1;
    if (!pieces)
        send(ends[1], bytes, size, 0);
    for (size_t at = 0; pieces && at + 2 <= size;) {
        size_t left = size - at - 2, piece = (size_t)bytes[at] << 8 | bytes[at + 1];
        piece = piece < left ? piece : left;
        /* What the socket has no room for is left out. */
        if (piece && send(ends[1], bytes + at + 2, piece, MSG_DONTWAIT) < 0)
            break;
        at += 2 + piece;
    }
    close(ends[1]);
    while (!(wrong = tensord_receive(lane, &answer, 0))) {
        fprintf(out, "c %ju %d %jd %s", (uintmax_t)answer.request_id, answer.final, (intmax_t)answer.version, answer.has_lease ? "l" : "-");
        fprintf(out, " %ju %ju %ju", (uintmax_t)answer.queue_ns, (uintmax_t)answer.compute_ns, (uintmax_t)answer.copied_byte_size);
        hex(answer.code, strlen(answer.code));
        hex(answer.message, strlen(answer.message));
        for (int i = 0; i < answer.outputs; i++) {
            const tensord_output *output = &answer.output[i];
            hex(output->name, output->name_size);
            hex(output->datatype, output->datatype_size);
            for (int j = 0; j < output->rank; j++)
                fprintf(out, " %jd", (intmax_t)output->shape[j]);
            if (output->content == NULL)
                fprintf(out, " placed");
            else
                hex(output->content, output->byte_size);
        }
        fputc(';', out);
    }
    if (wrong != TENSORD_ENDED)
        fputc('-', out);
    tensord__close_lane(lane);
}

static void json(const unsigned char *bytes, size_t size) {
    char *text = (char *)malloc(size + 1);
    if (text == NULL)
        exit(1);
    memcpy(text, bytes, size);
    text[size] = 0;
    const char *end = tensord__json_skip(text, 64);
    fprintf(out, "%jd %d %jd", (intmax_t)tensord__json_int(text, "lane", -1), tensord__json_true(text, "new"),
            end == NULL ? (intmax_t)-1 : (intmax_t)(end - text));
    free(text);
}

/* Returns what is read of the bytes, which the caller frees. */
__attribute__((visibility("default"))) char *read_records(int kind, const unsigned char *bytes, size_t size) {
    char *said;
    size_t said_size;
    /* Exactly as large, so that a read beyond its end is seen. */
    unsigned char *copy = (unsigned char *)malloc(size ? size : 1);
    if (copy == NULL || (out = open_memstream(&said, &said_size)) == NULL)
        exit(1);
    memcpy(copy, bytes, size);
    if (kind == 'a' || kind == 'p')
        to_client(copy, size, kind == 'p');
    else if (kind == 'j')
        json(copy, size);
    else if (to_worker(copy, size, 0))
        fputc('-', out);
    else
        to_worker(copy, size, 1);
    fclose(out);
    free(copy);
    return said;
}

int main(void) {
    int kind;
    uint32_t size;
    while ((kind = getchar()) != EOF && fread(&size, sizeof size, 1, stdin) == 1) {
        unsigned char *bytes = (unsigned char *)malloc(size ? size : 1);
        if (bytes == NULL || fread(bytes, 1, size, stdin) != size)
            return 1;
        char *said = read_records(kind, bytes, size);
        puts(said);
        fflush(stdout);
        free(said);
        free(bytes);
    }
    return 0;
}
