//! What can go wrong with replicated directories, in words for the person who must act.

use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

/// Errors of replicated directories.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// An operation on the backing directory failed.
    #[error("cannot {doing} {path:?}: {error}; {next_step}")]
    Backing {
        /// Verb and noun.
        doing: &'static str,
        /// Path in the backing directory.
        path: PathBuf,
        /// What the kernel said.
        error: io::Error,
        /// What to do about it.
        next_step: &'static str,
    },
    /// The FUSE file system cannot be mounted or served.
    #[error("cannot {doing} at {mountpoint:?}: {error}; {next_step}")]
    Mount {
        /// Verb and noun.
        doing: &'static str,
        /// Where.
        mountpoint: PathBuf,
        /// What the kernel said.
        error: io::Error,
        /// What to do about it.
        next_step: &'static str,
    },
    /// The directory has something in it that cannot be replicated.
    #[error(
        "{path:?} is {what}, which cannot be replicated; move it away or leave it out of --files"
    )]
    Unreplicable {
        /// Path in the backing directory.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// Changes could not be kept until the next checkpoint.
    #[error(
        "changes of {path:?} since the last checkpoint were lost ({reason}); its spares need a new \
         initial copy"
    )]
    ChangesLost {
        /// The replicated directory.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The spare's copy stopped being equal to the primary's directory.
    #[error("the copy in {path:?} cannot be used ({reason}); it needs a new initial copy")]
    CopyUnusable {
        /// The replicated directory.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// Bytes or changes that a primary does not send.
    #[error("received file changes make no sense: {0}; do both hosts run the same version?")]
    Malformed(String),
    /// A file that both hosts must have alike cannot be read.
    #[error("cannot read {path:?} to compare it with the other host's: {error}")]
    Identity {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        error: io::Error,
    },
}

/// What to do about an error of the file system below a directory.
pub(crate) fn next_step(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => {
            "free space on the file system it lies on, then start the spare again"
        }
        Some(libc::EIO) => "check the disk and the kernel log, then start the spare again",
        Some(libc::EROFS) => "mount its file system writable",
        Some(libc::EACCES | libc::EPERM) => "run hotspare as root",
        Some(libc::EMFILE | libc::ENFILE) => "raise the limit of open files (ulimit -n)",
        Some(libc::EXDEV) => "another file system is mounted inside the directory: unmount it",
        Some(libc::EOPNOTSUPP) => "use a file system that can do this (ext4, xfs, btrfs)",
        Some(libc::ENOENT | libc::EEXIST | libc::ENOTEMPTY) => {
            "something else than the guest changed the directory: keep others out, then start the \
             spare again"
        }
        _ => "start the spare again for a new initial copy",
    }
}

impl FilesError {
    /// `doing` failed on `path` of a backing directory.
    pub(crate) fn backing(doing: &'static str, path: &Path, error: impl Into<io::Error>) -> Self {
        let error = error.into();
        FilesError::Backing { doing, path: path.to_owned(), next_step: next_step(&error), error }
    }

    /// `doing` failed while mounting.
    pub(crate) fn mount(doing: &'static str, at: &Path, error: impl Into<io::Error>) -> Self {
        let error = error.into();
        let next_step = match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV) => {
                "load the fuse module (modprobe fuse) and make sure the mount point exists"
            }
            Some(libc::EPERM | libc::EACCES) => "run hotspare as root",
            _ => "see the kernel log",
        };
        FilesError::Mount { doing, mountpoint: at.to_owned(), error, next_step }
    }
}

/// The error number the guest sees.
pub(crate) fn errno_of(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}
