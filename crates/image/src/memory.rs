//! Address spaces: which mappings exist, of which kind, and which runs of pages travel.

use minicbor::{Decode, Encode};

use crate::numeric_name;
use crate::objects::FileId;
use crate::tree::{GuestPid, HostPath};

/// Bytes of a page on x86-64.
pub const PAGE_BYTES: u64 = 4096;

numeric_name!(
    /// An address in the guest.
    GuestAddr(u64)
);
numeric_name!(
    /// An address space; several processes share one only between `vfork` and `exec`.
    MmId(u32)
);
numeric_name!(
    /// A shared memory object (memfd, shared anonymous memory, SysV segment) within one guest.
    SharedId(u64)
);

impl GuestAddr {
    /// The address `bytes` further up; saturates at the top.
    pub fn plus(self, bytes: u64) -> Self {
        Self(self.0.saturating_add(bytes))
    }
}

/// A half-open range of guest addresses, page aligned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[cbor(array)]
pub struct GuestRange {
    /// First byte.
    #[n(0)]
    pub start: GuestAddr,
    /// One past the last byte.
    #[n(1)]
    pub end: GuestAddr,
}

impl GuestRange {
    /// The range `[start, end)`.
    pub fn new(start: u64, end: u64) -> Self {
        Self { start: GuestAddr(start), end: GuestAddr(end) }
    }
    /// Length in bytes; zero for a range that ends before it starts.
    pub fn bytes(self) -> u64 {
        self.end.0.saturating_sub(self.start.0)
    }
    /// Whether both ranges share a byte.
    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }
    /// Whether `other` lies inside.
    pub fn contains(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }
}

/// One address space with everything but its bytes.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct AddressSpace {
    /// Its name within the checkpoint.
    #[n(0)]
    pub id: MmId,
    /// Mappings in address order, without the recorder's own.
    #[n(1)]
    pub mappings: Vec<Mapping>,
    /// What `prctl(PR_SET_MM_MAP)` restores.
    #[n(2)]
    pub layout: Layout,
    /// The program, as `/proc/PID/exe` names it.
    #[n(3)]
    pub exe: HostPath,
    /// Mappings that were created since the last checkpoint, even where one of the same shape
    /// stood before: the ghost maps them afresh. (Discards travel among the page runs, in order.)
    #[n(4)]
    pub fresh: Vec<GuestRange>,
    /// The whole space is new (first checkpoint, fork or exec): the ghost starts from nothing.
    #[n(5)]
    pub reset: bool,
}

/// `struct prctl_mm_map` without the exe descriptor (prctl(2), `PR_SET_MM_MAP`).
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct Layout {
    /// start_code, end_code, start_data, end_data, start_brk, brk, start_stack, arg_start,
    /// arg_end, env_start, env_end: in the order of the kernel's structure.
    #[n(0)]
    pub words: [u64; 11],
    /// The auxiliary vector as the kernel keeps it.
    #[n(1)]
    #[cbor(with = "minicbor::bytes")]
    pub auxv: Vec<u8>,
    /// Dumpable flag (prctl(2), `PR_GET_DUMPABLE`).
    #[n(2)]
    pub dumpable: u8,
    /// `PR_SET_THP_DISABLE`.
    #[n(3)]
    pub thp_disabled: bool,
    /// Future mappings are locked (`mlockall(MCL_FUTURE)`).
    #[n(4)]
    pub lock_future: bool,
    /// membarrier(2) registrations, `MEMBARRIER_CMD_GET_REGISTRATIONS`.
    #[n(5)]
    pub membarrier: u32,
}

/// One mapping (a line of `/proc/PID/maps`).
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct Mapping {
    /// Where.
    #[n(0)]
    pub range: GuestRange,
    /// `PROT_READ | PROT_WRITE | PROT_EXEC` bits.
    #[n(1)]
    pub protection: u8,
    /// What stands behind it.
    #[n(2)]
    pub backing: Backing,
    /// Set of [`mapping_flags`] bits.
    #[n(3)]
    pub flags: u32,
    /// Memory protection key (pkeys(7)); 0 is the default.
    #[n(4)]
    pub protection_key: u8,
    /// `PR_SET_VMA_ANON_NAME`.
    #[n(5)]
    pub name: Option<String>,
}

impl Mapping {
    /// Flags that decide how memory is mapped, not how it is advised.
    const MAP_FLAGS: u32 = mapping_flags::GROWS_DOWN | mapping_flags::DROPPABLE;

    /// Whether this and a later mapping that lies over it are one memory, so that its pages stay.
    #[must_use]
    pub fn is_same_memory(&self, later: &Mapping) -> bool {
        let shift = |offset: u64, mapping: &Mapping| offset.wrapping_sub(mapping.range.start.0);
        let same_flags = self.flags & Self::MAP_FLAGS == later.flags & Self::MAP_FLAGS;
        same_flags
            && match (&self.backing, &later.backing) {
                (Backing::Anonymous, Backing::Anonymous) => true,
                (
                    Backing::PrivateFile { file, offset },
                    Backing::PrivateFile { file: other, offset: at },
                ) => file == other && shift(*offset, self) == shift(*at, later),
                (
                    Backing::SharedFile { file, offset, writable },
                    Backing::SharedFile { file: other, offset: at, writable: write },
                ) => {
                    let same_place = shift(*offset, self) == shift(*at, later);
                    file == other && same_place && writable == write
                }
                (
                    Backing::SharedMemory { object, offset, private, writable },
                    Backing::SharedMemory {
                        object: other,
                        offset: at,
                        private: apart,
                        writable: write,
                    },
                ) => {
                    object == other
                        && shift(*offset, self) == shift(*at, later)
                        && (private, writable) == (apart, write)
                }
                (Backing::Special { name }, Backing::Special { name: other }) => name == other,
                (
                    Backing::Anonymous
                    | Backing::PrivateFile { .. }
                    | Backing::SharedFile { .. }
                    | Backing::SharedMemory { .. }
                    | Backing::Special { .. },
                    _,
                ) => false,
            }
    }
}

/// Bits of [`Mapping::flags`], from `VmFlags` of `/proc/PID/smaps` (proc(5)).
pub mod mapping_flags {
    /// Grows down (a stack made with `MAP_GROWSDOWN` or by exec).
    pub const GROWS_DOWN: u32 = 1;
    /// Locked in memory.
    pub const LOCKED: u32 = 1 << 1;
    /// `MADV_DONTFORK`.
    pub const DONT_FORK: u32 = 1 << 2;
    /// `MADV_DONTDUMP`.
    pub const DONT_DUMP: u32 = 1 << 3;
    /// `MADV_HUGEPAGE`.
    pub const HUGE_PAGE: u32 = 1 << 4;
    /// `MADV_NOHUGEPAGE`.
    pub const NO_HUGE_PAGE: u32 = 1 << 5;
    /// `MADV_MERGEABLE`.
    pub const MERGEABLE: u32 = 1 << 6;
    /// `MADV_WIPEONFORK`.
    pub const WIPE_ON_FORK: u32 = 1 << 7;
    /// `MADV_SEQUENTIAL`.
    pub const SEQUENTIAL: u32 = 1 << 8;
    /// `MADV_RANDOM`.
    pub const RANDOM: u32 = 1 << 9;
    /// `MAP_NORESERVE`.
    pub const NO_RESERVE: u32 = 1 << 10;
    /// The main stack, which exec made: always present below the argument strings.
    pub const MAIN_STACK: u32 = 1 << 11;
    /// `MLOCK_ONFAULT`.
    pub const LOCK_ON_FAULT: u32 = 1 << 12;
    /// `MAP_DROPPABLE`: its content may vanish at any time, and does not travel.
    pub const DROPPABLE: u32 = 1 << 13;
}

/// What stands behind a mapping.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum Backing {
    /// Private anonymous memory, heap and stacks among it.
    #[n(0)]
    Anonymous,
    /// `MAP_PRIVATE` of a file: written pages lie on top.
    #[n(1)]
    PrivateFile {
        /// The file.
        #[n(0)]
        file: MappedFile,
        /// Offset in bytes.
        #[n(1)]
        offset: u64,
    },
    /// `MAP_SHARED` of a file in a shared or replicated directory.
    #[n(2)]
    SharedFile {
        /// The file.
        #[n(0)]
        file: MappedFile,
        /// Offset in bytes.
        #[n(1)]
        offset: u64,
        /// Opened for writing (decides `VM_MAYWRITE`).
        #[n(2)]
        writable: bool,
    },
    /// A shared memory object: memfd, shared anonymous memory, SysV segment. `private` for a
    /// `MAP_PRIVATE` mapping of a memfd.
    #[n(3)]
    SharedMemory {
        /// Which.
        #[n(0)]
        object: SharedId,
        /// Offset in bytes.
        #[n(1)]
        offset: u64,
        /// Mapped private.
        #[n(2)]
        private: bool,
        /// The descriptor it was mapped from could write.
        #[n(3)]
        writable: bool,
    },
    /// The kernel's vvar, vvar_vclock or vdso pages.
    #[n(4)]
    Special {
        /// `[vvar]`, `[vvar_vclock]` or `[vdso]`.
        #[n(0)]
        name: String,
    },
}

/// A file that is mapped.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct MappedFile {
    /// Its path in the guest.
    #[n(0)]
    pub path: HostPath,
    /// Its inode number in a replicated directory, when it has no path any more.
    #[n(1)]
    pub unlinked_inode: Option<u64>,
    /// An open file of the checkpoint, for what has neither.
    #[n(2)]
    pub open_file: Option<FileId>,
}

/// A shared memory object; its bytes travel as pages of [`PageOwner::Shared`].
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct SharedMemory {
    /// Its name, equal in all checkpoints of the guest.
    #[n(0)]
    pub id: SharedId,
    /// What made it.
    #[n(1)]
    pub kind: SharedKind,
    /// Size in bytes.
    #[n(2)]
    pub bytes: u64,
    /// New since the last checkpoint.
    #[n(3)]
    pub reset: bool,
}

/// What made a shared memory object.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum SharedKind {
    /// `mmap(MAP_SHARED | MAP_ANONYMOUS)`.
    #[n(0)]
    Anonymous,
    /// memfd_create(2).
    #[n(1)]
    Memfd {
        /// Name given at creation.
        #[n(0)]
        name: String,
        /// `F_GET_SEALS`.
        #[n(1)]
        seals: u32,
        /// Permission bits.
        #[n(2)]
        mode: u32,
    },
    /// shmget(2).
    #[n(2)]
    SysV {
        /// Identifier as the guest knows it.
        #[n(0)]
        id: i32,
        /// Key.
        #[n(1)]
        key: i32,
        /// Mode bits, with `SHM_DEST`.
        #[n(2)]
        mode: u32,
        /// Owner.
        #[n(3)]
        uid: u32,
        /// Owner's group.
        #[n(4)]
        gid: u32,
        /// `shm_cpid`; 0 for a process that has ended.
        #[n(5)]
        #[cbor(default)]
        creator: GuestPid,
    },
}

/// Whose pages a run holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub enum PageOwner {
    /// Private pages of an address space, by address.
    #[n(0)]
    Mm(#[n(0)] MmId),
    /// Pages of a shared memory object, by offset.
    #[n(1)]
    Shared(#[n(0)] SharedId),
}
