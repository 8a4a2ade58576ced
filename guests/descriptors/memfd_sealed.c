// Feature: sealed memfd
// Proves: seals against shrinking, growing and writing, contents, offset and size stay and hold.
#include "guest.h"

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int frozen = (int)SYS(memfd_create("frozen", MFD_ALLOW_SEALING | MFD_CLOEXEC));
    int growing = (int)SYS(memfd_create("growing", MFD_ALLOW_SEALING));
    int unsealable = (int)SYS(memfd_create("unsealable", 0));
    uint8_t bytes[10000];
    fill(bytes, sizeof bytes, 3);
    put(frozen, bytes, sizeof bytes);
    int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL;
    SYS(fcntl(frozen, F_ADD_SEALS, seals));
    SYS(fcntl(growing, F_ADD_SEALS, F_SEAL_SHRINK));
    uint8_t *mapped = mmap(NULL, sizeof bytes, PROT_READ, MAP_SHARED, frozen, 0);
    CHECK(mapped != MAP_FAILED);
    SYS(lseek(frozen, 77, SEEK_SET));
    STEPS {
        put_long(growing, g.step);
        nap();
        EQ(SYS(fcntl(frozen, F_GET_SEALS)), seals);
        EQ(SYS(fcntl(growing, F_GET_SEALS)), F_SEAL_SHRINK);
        EQ(SYS(fcntl(unsealable, F_GET_SEALS)), F_SEAL_SEAL);
        EQ(lseek(frozen, 0, SEEK_CUR), 77);
        EQ(lseek(growing, 0, SEEK_CUR), g.step * (long)sizeof(long));
        FILLED(mapped, sizeof bytes, 3);
        EQ(pread(frozen, bytes, sizeof bytes, 0), sizeof bytes);
        FILLED(bytes, sizeof bytes, 3);
        FAILS(pwrite(frozen, bytes, 1, 0), EPERM);
        FAILS(ftruncate(frozen, 1), EPERM);
        FAILS(ftruncate(growing, 1), EPERM);
        FAILS(fcntl(frozen, F_ADD_SEALS, F_SEAL_WRITE), EPERM);
        for (long i = 1; i <= g.step; i++) {
            long value;
            EQ(pread(growing, &value, sizeof value, (i - 1) * 8), 8);
            EQ(value, i);
        }
    }
    return guest_pass();
}
