/* Writes and reads a file by io_uring at given offsets, at the current one, and appends by it: uring FILE. 77: there is
 * no io_uring. */
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { BLOCK = 300000, BLOCKS = 8 };

static int ring;
static struct io_uring_sqe *entries;
static struct io_uring_cqe *results;
static unsigned *tail, *mask, *order, *head, *results_mask;

static int carry_out(int operation, int fd, void *bytes, unsigned len, long long offset) {
    unsigned at = *tail, index = at & *mask;
    memset(&entries[index], 0, sizeof entries[index]);
    entries[index].opcode = operation;
    entries[index].fd = fd;
    entries[index].addr = (unsigned long)bytes;
    entries[index].len = len;
    entries[index].off = offset;
    order[index] = index;
    __atomic_store_n(tail, at + 1, __ATOMIC_RELEASE);
    if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0) return -1;
    int result = results[*head & *results_mask].res;
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return result;
}

int main(int argc, char **argv) {
    static char block[BLOCK], found[BLOCK];
    struct io_uring_params params = {0};
    ring = syscall(SYS_io_uring_setup, 4, &params);
    if (ring < 0) return 77;
    if (argc != 2) return 2;
    char *queue = mmap(NULL, params.sq_off.array + params.sq_entries * 4, 3, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    char *done = mmap(NULL, params.cq_off.cqes + params.cq_entries * sizeof *results, 3, MAP_SHARED, ring, IORING_OFF_CQ_RING);
    entries = mmap(NULL, params.sq_entries * sizeof *entries, 3, MAP_SHARED, ring, IORING_OFF_SQES);
    tail = (unsigned *)(queue + params.sq_off.tail);
    mask = (unsigned *)(queue + params.sq_off.ring_mask);
    order = (unsigned *)(queue + params.sq_off.array);
    head = (unsigned *)(done + params.cq_off.head);
    results_mask = (unsigned *)(done + params.cq_off.ring_mask);
    results = (struct io_uring_cqe *)(done + params.cq_off.cqes);
    int fd = open(argv[1], O_CREAT | O_TRUNC | O_RDWR, 0644);
    for (int turn = 0; turn < BLOCKS; turn++) {
        int index = turn * 3 % BLOCKS;
        memset(block, 'A' + index, BLOCK);
        if (carry_out(IORING_OP_WRITE, fd, block, BLOCK, (long long)index * BLOCK) != BLOCK) return 3;
    }
    for (int index = 0; index < BLOCKS; index++) {
        if (carry_out(IORING_OP_READ, fd, found, BLOCK, (long long)index * BLOCK) != BLOCK) return 4;
        memset(block, 'A' + index, BLOCK);
        if (memcmp(block, found, BLOCK)) return 5;
    }
    int appending = open(argv[1], O_WRONLY | O_APPEND);
    for (int index = 0; index < BLOCKS; index++) {
        memset(block, 'a' + index, BLOCK);
        if (carry_out(IORING_OP_WRITE, appending, block, BLOCK, -1) != BLOCK) return 6;
    }
    int current = open(argv[1], O_RDWR);
    for (int index = 0; index < BLOCKS; index++) {
        memset(block, '0' + index, BLOCK);
        if (carry_out(IORING_OP_WRITE, current, block, BLOCK, -1) != BLOCK) return 7;
    }
    for (int index = BLOCKS - 1; index >= 0; index--) {
        if (lseek(current, (long long)index * BLOCK, SEEK_SET) < 0) return 8;
        if (carry_out(IORING_OP_READ, current, found, BLOCK, -1) != BLOCK) return 9;
        memset(block, '0' + index, BLOCK);
        if (memcmp(block, found, BLOCK) || lseek(current, 0, SEEK_CUR) != (index + 1LL) * BLOCK) return 10;
    }
    if (write(current, block, BLOCK) != BLOCK) return 11;
    printf("%lld\n", (long long)lseek(fd, 0, SEEK_END));
    return close(fd) || close(appending) || close(current);
}
