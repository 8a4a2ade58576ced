//! Files that are not replicated but must be alike on both hosts: the program, its libraries, its
//! configuration. Compared by content before protection starts.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use hotspare_image::files::FileIdentity;

use crate::error::FilesError;

/// What a file must still be for a remembered hash to count. A change of content changes ctime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Version {
    device: u64,
    inode: u64,
    size_bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Version {
    fn of(meta: &Metadata) -> Version {
        Version {
            device: meta.dev(),
            inode: meta.ino(),
            size_bytes: meta.size(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }
}

/// Hashes files, each version of a file once.
#[derive(Debug, Default)]
pub struct Identities {
    hashes: HashMap<Version, [u8; 32]>,
}

impl Identities {
    /// Nothing hashed yet.
    pub fn new() -> Identities {
        Identities::default()
    }

    /// The identity of the file at `path`, which must be a regular file or lead to one. Costs one
    /// stat if this version was hashed before.
    pub fn identify(&mut self, path: &Path) -> Result<FileIdentity, FilesError> {
        let failed = |error| FilesError::Identity { path: path.to_owned(), error };
        let meta = fs::metadata(path).map_err(failed)?;
        if !meta.is_file() {
            let kind = io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
            return Err(failed(kind));
        }
        let version = Version::of(&meta);
        let blake3 = match self.hashes.get(&version) {
            Some(hash) => *hash,
            None => {
                let (hashed, hash) = hash_content(path).map_err(failed)?;
                // Not remembered if it changed while it was read, or so lately that another change
                // might get the same ctime (the kernel's clock for files ticks every few ms).
                if hashed == version && version.changed.0 < seconds_now() - 1 {
                    self.hashes.insert(version, hash);
                }
                hash
            }
        };
        Ok(FileIdentity {
            path: path.as_os_str().as_bytes().to_vec(),
            size_bytes: meta.size(),
            mode: meta.mode(),
            blake3,
        })
    }

    /// The identities of `paths`, in order. The first file that cannot be read is the error.
    pub fn identify_all<'a>(
        &mut self,
        paths: impl IntoIterator<Item = &'a Path>,
    ) -> Result<Vec<FileIdentity>, FilesError> {
        paths.into_iter().map(|path| self.identify(path)).collect()
    }

    /// Compares the other host's files with those at the same paths here. Every file that is not
    /// alike is in the answer; an empty one means all are.
    pub fn compare(&mut self, theirs: &[FileIdentity]) -> Vec<Mismatch> {
        let compare_one = |their: &FileIdentity| {
            let path = PathBuf::from(std::ffi::OsStr::from_bytes(&their.path));
            let difference = match self.identify(&path) {
                Ok(ours) => Difference::between(&ours, their)?,
                Err(FilesError::Identity { error, .. })
                    if error.kind() == io::ErrorKind::NotFound =>
                {
                    Difference::Missing
                }
                Err(error) => Difference::Unreadable(error.to_string()),
            };
            Some(Mismatch { path, difference })
        };
        theirs.iter().filter_map(compare_one).collect()
    }
}

fn seconds_now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |since| since.as_secs() as i64)
}

fn hash_content(path: &Path) -> io::Result<(Version, [u8; 32])> {
    let mut file = File::open(path)?;
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(&mut file)?;
    Ok((Version::of(&file.metadata()?), *hasher.finalize().as_bytes()))
}

/// How a file differs from the other host's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Difference {
    /// It is not there.
    #[error("missing here")]
    Missing,
    /// It cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// Another size.
    #[error("{here_bytes} bytes here, {there_bytes} bytes on the other host")]
    Size {
        /// Size here, bytes.
        here_bytes: u64,
        /// Size there, bytes.
        there_bytes: u64,
    },
    /// Same size, other content.
    #[error("other content than on the other host")]
    Content,
    /// Same content, other type or permissions.
    #[error("mode {here:o} here, {there:o} on the other host")]
    Mode {
        /// `st_mode` here.
        here: u32,
        /// `st_mode` there.
        there: u32,
    },
}

impl Difference {
    fn between(ours: &FileIdentity, theirs: &FileIdentity) -> Option<Difference> {
        if ours.size_bytes != theirs.size_bytes {
            let (here_bytes, there_bytes) = (ours.size_bytes, theirs.size_bytes);
            Some(Difference::Size { here_bytes, there_bytes })
        } else if ours.blake3 != theirs.blake3 {
            Some(Difference::Content)
        } else if ours.mode != theirs.mode {
            Some(Difference::Mode { here: ours.mode, there: theirs.mode })
        } else {
            None
        }
    }
}

/// A file that is not the same on both hosts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{path:?}: {difference}; install the same version on both hosts, or declare it with --files \
     shared: or replicate:"
)]
pub struct Mismatch {
    /// The file.
    pub path: PathBuf,
    /// How it differs.
    pub difference: Difference,
}

/// Lists regular files below `paths` (files stand for themselves), sorted and without repetition;
/// symbolic links inside directories are not followed.
pub fn list_files<'a>(
    paths: impl IntoIterator<Item = &'a Path>,
) -> Result<Vec<PathBuf>, FilesError> {
    let mut found = BTreeSet::new();
    let mut waiting: Vec<(PathBuf, bool)> =
        paths.into_iter().map(|path| (path.to_owned(), true)).collect();
    while let Some((path, follow)) = waiting.pop() {
        let failed = |error| FilesError::Identity { path: path.clone(), error };
        let meta = if follow { fs::metadata(&path) } else { fs::symlink_metadata(&path) };
        let meta = meta.map_err(failed)?;
        if meta.is_dir() {
            for entry in fs::read_dir(&path).map_err(failed)? {
                waiting.push((entry.map_err(failed)?.path(), false));
            }
        } else if meta.is_file() {
            found.insert(path);
        }
    }
    Ok(found.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn every_difference_is_told_with_its_path() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for name in ["same", "content", "size", "mode", "missing"] {
            fs::write(path(name), b"1234").unwrap();
        }
        let mut identities = Identities::new();
        let files = list_files([directory.path()]).unwrap();
        let theirs = identities.identify_all(files.iter().map(PathBuf::as_path)).unwrap();
        assert_eq!(theirs.len(), 5);
        assert_eq!(identities.compare(&theirs), []);
        fs::write(path("content"), b"4321").unwrap();
        fs::write(path("size"), b"12345").unwrap();
        fs::set_permissions(path("mode"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::remove_file(path("missing")).unwrap();
        let found: BTreeMap<PathBuf, Difference> =
            identities.compare(&theirs).into_iter().map(|m| (m.path, m.difference)).collect();
        assert_eq!(found.len(), 4);
        assert_eq!(found[&path("content")], Difference::Content);
        let size = Difference::Size { here_bytes: 5, there_bytes: 4 };
        assert_eq!(found[&path("size")], size);
        assert!(matches!(found[&path("mode")], Difference::Mode { here: 0o100755, .. }));
        assert_eq!(found[&path("missing")], Difference::Missing);
    }

    #[test]
    fn an_old_file_is_hashed_once_and_a_new_one_every_time() {
        let mut identities = Identities::new();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        let mut hashes = Vec::new();
        for content in [b"one", b"two"] {
            fs::write(&path, content).unwrap();
            hashes.push(identities.identify(&path).unwrap().blake3);
        }
        assert_ne!(hashes[0], hashes[1]);
        assert!(identities.hashes.is_empty());
        let shell = identities.identify(Path::new("/bin/sh")).unwrap();
        assert_eq!(identities.hashes.len(), 1);
        assert_eq!(identities.identify(Path::new("/bin/sh")).unwrap(), shell);
        assert_eq!(identities.hashes.len(), 1);
    }

    #[test]
    fn what_is_no_file_is_refused() {
        let error = Identities::new().identify(Path::new("/dev")).unwrap_err();
        assert!(error.to_string().contains("/dev"));
    }
}
