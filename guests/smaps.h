// Reads what the kernel says of one mapping.
#ifndef SMAPS_H
#define SMAPS_H
#include "guest.h"

// The value of a line such as "VmFlags:" or "Locked:" for the mapping this address lies in, or its
// first line if the key is empty.
HELPER const char *smaps_value(const void *address, const char *key) {
    static char line[1024];
    FILE *file = fopen("/proc/self/smaps", "re");
    CHECK(file);
    bool inside = false, found = false;
    while (!found && fgets(line, sizeof line, file)) {
        unsigned long from, to;
        bool head = sscanf(line, "%lx-%lx ", &from, &to) == 2;
        if (head) inside = (uintptr_t)address >= from && (uintptr_t)address < to;
        found = inside && (*key ? !strncmp(line, key, strlen(key)) : head);
    }
    fclose(file);
    CHECK(found, "no %s for %p", key, address);
    return line + strlen(key);
}

// Whether the two-letter flag is set.
HELPER bool smaps_flag(const void *address, const char *flag) {
    return strstr(smaps_value(address, "VmFlags:"), flag) != NULL;
}

// Protection as in /proc/self/maps: "rw-p".
HELPER void smaps_protection(const void *address, const char *want) {
    const char *line = smaps_value(address, ""), *got = strchr(line, ' ') + 1;
    CHECK(!strncmp(got, want, 4), "%p expected %s, got %.4s", address, want, got);
}

#endif
