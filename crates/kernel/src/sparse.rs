//! Files with holes, read from an offset (lseek(2), pread(2)).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};

/// The next range at or after `offset` that is not a hole; none behind the last. A file that is
/// shortened meanwhile has no more.
pub fn next_data(file: &File, offset: u64) -> Result<Option<(u64, u64)>, Errno> {
    let from = i64::try_from(offset).map_err(|_| Errno::EFBIG)?;
    let seek = |from, whence| match lseek(file, from, whence) {
        Ok(at) => Ok(Some(at)),
        Err(Errno::ENXIO) => Ok(None),
        Err(error) => Err(error),
    };
    let Some(start) = seek(from, Whence::SeekData)? else { return Ok(None) };
    Ok(seek(start, Whence::SeekHole)?.map(|end| (start as u64, end as u64)))
}

/// Reads from `offset` until `bytes` are full or the file ends; how many were read.
pub fn read_up_to(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut count = 0;
    while count < bytes.len() {
        match file.read_at(&mut bytes[count..], offset + count as u64) {
            Ok(0) => break,
            Ok(more) => count += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_found_between_holes_and_none_behind_the_end() {
        let path = std::env::temp_dir().join(format!("hotspare-sparse-{}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(3 << 20).unwrap();
        file.write_at(b"here", 1 << 20).unwrap();
        let (start, end) = next_data(&file, 0).unwrap().unwrap();
        assert!((start..end).contains(&(1 << 20)), "{start} {end}");
        assert_eq!(next_data(&file, end).unwrap().filter(|(start, _)| *start >= 3 << 20), None);
        assert_eq!(next_data(&file, 4 << 20).unwrap(), None, "behind the end");
        assert_eq!(next_data(&file, u64::MAX), Err(Errno::EFBIG));
        let mut bytes = [7u8; 8];
        assert_eq!(read_up_to(&file, &mut bytes, 1 << 20).unwrap(), 8);
        assert_eq!(&bytes, b"here\0\0\0\0");
        assert_eq!(read_up_to(&file, &mut bytes, (3 << 20) - 3).unwrap(), 3);
    }
}
