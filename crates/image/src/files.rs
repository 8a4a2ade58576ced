//! Changes of replicated directories, as they travel with a checkpoint.
//!
//! An inode keeps its number for life, on every host; numbers are never used again. The changes of
//! one epoch, applied in order to a directory that is equal to the primary's at the epoch before,
//! make it equal to the primary's at the epoch's end.

use minicbor::{Decode, Decoder, Encode, Encoder};

use crate::numeric_name;

numeric_name!(
    /// Number of an inode of a replicated directory: what the guest sees as `st_ino`, on every
    /// host. 1 is the directory itself.
    InodeNumber(u64)
);

numeric_name!(
    /// Names one initial copy of a directory, so that a spare knows which logged changes its copy
    /// does not contain yet.
    CopyMark(u64)
);

impl InodeNumber {
    /// The replicated directory itself.
    pub const ROOT: InodeNumber = InodeNumber(1);
}

/// One component of a path: 1 to 255 bytes, no `/`, no NUL, not `.` or `..`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileName(Box<[u8]>);

impl FileName {
    /// Takes `bytes` as a name, or `None` when no file can have that name.
    pub fn new(bytes: &[u8]) -> Option<FileName> {
        let possible = !bytes.is_empty()
            && bytes.len() <= 255
            && !bytes.contains(&b'/')
            && !bytes.contains(&0)
            && bytes != b"."
            && bytes != b"..";
        possible.then(|| FileName(bytes.into()))
    }

    /// The bytes of the name.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl<C> Encode<C> for FileName {
    fn encode<W: minicbor::encode::Write>(
        &self,
        e: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), minicbor::encode::Error<W::Error>> {
        e.bytes(&self.0)?.ok()
    }
}

impl<'b, C> Decode<'b, C> for FileName {
    fn decode(d: &mut Decoder<'b>, _: &mut C) -> Result<Self, minicbor::decode::Error> {
        FileName::new(d.bytes()?).ok_or_else(|| minicbor::decode::Error::message("no file name"))
    }
}

/// A point in time of a file: seconds since 1970 (may be negative) and nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
#[cbor(array)]
pub struct FileTime {
    /// Seconds since 1970-01-01 UTC.
    #[n(0)]
    pub seconds: i64,
    /// Nanoseconds after that second, below 10⁹.
    #[n(1)]
    pub nanoseconds: u32,
}

/// What an inode is. Devices do not exist in replicated directories.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum NodeKind {
    /// Regular file.
    #[n(0)]
    Regular,
    /// Directory.
    #[n(1)]
    Directory,
    /// Symbolic link and where it points.
    #[n(2)]
    Symlink(
        #[n(0)]
        #[cbor(with = "minicbor::bytes")]
        Vec<u8>,
    ),
    /// FIFO.
    #[n(3)]
    Fifo,
    /// Name of a bound UNIX socket.
    #[n(4)]
    Socket,
}

/// A new inode.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct NewNode {
    /// Its number.
    #[n(0)]
    pub inode: InodeNumber,
    /// What it is.
    #[n(1)]
    pub kind: NodeKind,
    /// Permission bits, set-user-ID, set-group-ID and sticky (07777).
    #[n(2)]
    pub mode: u32,
    /// Owner.
    #[n(3)]
    pub uid: u32,
    /// Group.
    #[n(4)]
    pub gid: u32,
}

/// Attributes of an inode at the end of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct NodeAttributes {
    /// Permission bits, set-user-ID, set-group-ID and sticky (07777).
    #[n(0)]
    pub mode: u32,
    /// Owner.
    #[n(1)]
    pub uid: u32,
    /// Group.
    #[n(2)]
    pub gid: u32,
    /// Last access.
    #[n(3)]
    pub accessed: FileTime,
    /// Last change of the content.
    #[n(4)]
    pub modified: FileTime,
    /// Last change of the inode.
    #[n(5)]
    pub changed: FileTime,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum FileChange {
    /// A new inode with its first name.
    #[n(0)]
    Create {
        /// Directory.
        #[n(0)]
        parent: InodeNumber,
        /// Name in it.
        #[n(1)]
        name: FileName,
        /// The inode.
        #[n(2)]
        node: NewNode,
    },
    /// An inode that has no name any more but is still open (initial copies only).
    #[n(1)]
    CreateNameless {
        /// The inode.
        #[n(0)]
        node: NewNode,
    },
    /// A further name of an inode.
    #[n(2)]
    Link {
        /// The inode.
        #[n(0)]
        inode: InodeNumber,
        /// Directory.
        #[n(1)]
        parent: InodeNumber,
        /// Name in it.
        #[n(2)]
        name: FileName,
    },
    /// A name goes away: unlink(2) or, if it names a directory, rmdir(2). An inode without names
    /// lives on until `Forget`.
    #[n(3)]
    Remove {
        /// Directory.
        #[n(0)]
        parent: InodeNumber,
        /// Name in it.
        #[n(1)]
        name: FileName,
    },
    /// rename(2). What had the new name before loses it.
    #[n(4)]
    Rename {
        /// Directory it was in.
        #[n(0)]
        from_parent: InodeNumber,
        /// Name it had.
        #[n(1)]
        from_name: FileName,
        /// Directory it is in now.
        #[n(2)]
        to_parent: InodeNumber,
        /// Name it has now.
        #[n(3)]
        to_name: FileName,
        /// `RENAME_EXCHANGE`: the two names swap.
        #[n(4)]
        exchange: bool,
    },
    /// Bytes of a regular file.
    #[n(5)]
    Write {
        /// The file.
        #[n(0)]
        inode: InodeNumber,
        /// Where they start.
        #[n(1)]
        offset: u64,
        /// The bytes.
        #[n(2)]
        #[cbor(with = "minicbor::bytes")]
        bytes: Vec<u8>,
    },
    /// The size of a regular file, bytes.
    #[n(6)]
    Truncate {
        /// The file.
        #[n(0)]
        inode: InodeNumber,
        /// New size.
        #[n(1)]
        size_bytes: u64,
    },
    /// fallocate(2).
    #[n(7)]
    Allocate {
        /// The file.
        #[n(0)]
        inode: InodeNumber,
        /// Where the range starts.
        #[n(1)]
        offset: u64,
        /// Its length.
        #[n(2)]
        length: u64,
        /// `FALLOC_FL_*`: none, keep size, punch hole, zero range.
        #[n(3)]
        mode: i32,
    },
    /// setxattr(2).
    #[n(8)]
    SetXattr {
        /// The inode.
        #[n(0)]
        inode: InodeNumber,
        /// Name with its prefix.
        #[n(1)]
        #[cbor(with = "minicbor::bytes")]
        name: Vec<u8>,
        /// Value.
        #[n(2)]
        #[cbor(with = "minicbor::bytes")]
        value: Vec<u8>,
    },
    /// removexattr(2).
    #[n(9)]
    RemoveXattr {
        /// The inode.
        #[n(0)]
        inode: InodeNumber,
        /// Name with its prefix.
        #[n(1)]
        #[cbor(with = "minicbor::bytes")]
        name: Vec<u8>,
    },
    /// Attributes at the end of the epoch; after every other change of the inode.
    #[n(10)]
    Attributes {
        /// The inode.
        #[n(0)]
        inode: InodeNumber,
        /// What they are.
        #[n(1)]
        attributes: NodeAttributes,
    },
    /// An inode without names is not open any more either: it is gone.
    #[n(11)]
    Forget {
        /// The inode.
        #[n(0)]
        inode: InodeNumber,
    },
    /// An initial copy starts: everything the spare has in this directory is discarded.
    #[n(12)]
    CopyBegin {
        /// Names the copy.
        #[n(0)]
        mark: CopyMark,
        /// The number the next new inode gets.
        #[n(1)]
        next_inode: InodeNumber,
    },
    /// The initial copy is complete.
    #[n(13)]
    CopyEnd {
        /// Names the copy.
        #[n(0)]
        mark: CopyMark,
    },
    /// Changes before this one are part of the initial copy `mark`; those after it are not.
    #[n(14)]
    Mark {
        /// Names the copy.
        #[n(0)]
        mark: CopyMark,
    },
}

impl FileChange {
    /// Bytes of file content it carries.
    pub fn content_bytes(&self) -> usize {
        match self {
            FileChange::Write { bytes, .. } => bytes.len(),
            FileChange::SetXattr { value, .. } => value.len(),
            FileChange::Create { .. }
            | FileChange::CreateNameless { .. }
            | FileChange::Link { .. }
            | FileChange::Remove { .. }
            | FileChange::Rename { .. }
            | FileChange::Truncate { .. }
            | FileChange::Allocate { .. }
            | FileChange::RemoveXattr { .. }
            | FileChange::Attributes { .. }
            | FileChange::Forget { .. }
            | FileChange::CopyBegin { .. }
            | FileChange::CopyEnd { .. }
            | FileChange::Mark { .. } => 0,
        }
    }
}

/// The CBOR bytes of some changes, in order.
pub fn encode_changes(changes: &[FileChange]) -> Vec<u8> {
    match minicbor::to_vec(changes) {
        Ok(bytes) => bytes,
        Err(never) => unreachable!("writing to memory cannot fail: {never}"),
    }
}

/// Reads what [`encode_changes`] wrote. Never panics on foreign bytes.
pub fn decode_changes(bytes: &[u8]) -> Result<Vec<FileChange>, crate::ImageError> {
    minicbor::decode(bytes).map_err(|error| crate::ImageError::Malformed(error.to_string()))
}

/// Who a file is that both hosts must have alike: program, library, configuration.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct FileIdentity {
    /// Absolute path, bytes as the kernel has them.
    #[n(0)]
    #[cbor(with = "minicbor::bytes")]
    pub path: Vec<u8>,
    /// Size in bytes.
    #[n(1)]
    pub size_bytes: u64,
    /// Type and permission bits (`st_mode`).
    #[n(2)]
    pub mode: u32,
    /// BLAKE3 of the content.
    #[n(3)]
    #[cbor(with = "minicbor::bytes")]
    pub blake3: [u8; 32],
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> FileName {
        FileName::new(text.as_bytes()).unwrap()
    }

    #[test]
    fn changes_survive_their_encoding() {
        let changes = vec![
            FileChange::Create {
                parent: InodeNumber::ROOT,
                name: name("a"),
                node: NewNode {
                    inode: InodeNumber(7),
                    kind: NodeKind::Symlink(b"../x".to_vec()),
                    mode: 0o777,
                    uid: 1,
                    gid: 2,
                },
            },
            FileChange::Write { inode: InodeNumber(7), offset: u64::MAX, bytes: vec![0, 255] },
            FileChange::Rename {
                from_parent: InodeNumber::ROOT,
                from_name: name("a"),
                to_parent: InodeNumber::ROOT,
                to_name: name("b"),
                exchange: true,
            },
        ];
        assert_eq!(decode_changes(&encode_changes(&changes)).unwrap(), changes);
    }

    #[test]
    fn a_name_that_leaves_its_directory_is_refused() {
        for bad in [&b""[..], b".", b"..", b"a/b", b"a\0", &[b'x'; 256]] {
            assert_eq!(FileName::new(bad), None);
        }
        let mut bytes = Vec::new();
        Encoder::new(&mut bytes).bytes(b"../etc").unwrap();
        assert!(minicbor::decode::<FileName>(&bytes).is_err());
    }

    #[test]
    fn foreign_bytes_are_an_error() {
        for length in 0..64_usize {
            let bytes: Vec<u8> = (0..length).map(|i| (i * 37 + 0x9b) as u8).collect();
            let _ = decode_changes(&bytes);
        }
        assert!(decode_changes(&[0x9b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]).is_err());
    }
}
