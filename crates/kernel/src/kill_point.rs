//! Places in our own code at which a test can have the program die, to show that dying there is
//! survived.
//!
//! The program that ships has them, so that it is the one that is tested. Without
//! `HOTSPARE_KILL_POINT` in the environment, passing one is a look at a flag. With it the variable
//! names a file: whoever passes the point that is written there renames it to `….reached` and kills
//! itself (SIGKILL, so that nobody says goodbye).

use std::path::PathBuf;
use std::sync::OnceLock;

/// The environment variable that names the file.
pub const VARIABLE: &str = "HOTSPARE_KILL_POINT";

/// Who passes a point, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A primary, in each epoch.
    Primary,
    /// A spare, in each epoch.
    Spare,
    /// A spare that is new.
    Join,
    /// A spare that becomes the primary.
    Takeover,
}

macro_rules! points {
    ($($point:ident $role:ident $name:literal $text:literal,)*) => {
        /// A point.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum KillPoint { $(#[doc = $text] $point,)* }

        impl KillPoint {
            /// All of them, in the order in which they are passed.
            pub const ALL: &[KillPoint] = &[$(KillPoint::$point,)*];

            /// As it is written in the file.
            pub fn name(self) -> &'static str {
                match self { $(KillPoint::$point => $name,)* }
            }

            /// Who passes it.
            pub fn role(self) -> Role {
                match self { $(KillPoint::$point => Role::$role,)* }
            }
        }
    };
}

points! {
    Copied Primary "primary-copied" "Memory was copied beside the guest; it is about to stop.",
    Stopped Primary "primary-stopped" "The guest stands still.",
    Captured Primary "primary-captured" "The guest runs again; the rest of it is only here.",
    HalfSent Primary "primary-half-sent" "A part of that rest is handed to the thread that sends.",
    Sent Primary "primary-sent" "So is its end.",
    Acknowledged Primary "primary-acknowledged" "A spare has it; what waits for that is held.",
    Released Primary "primary-released" "What waited for it has left.",
    Staged Spare "spare-staged" "A checkpoint is whole; nobody knows yet.",
    Promised Spare "spare-promised" "It is acknowledged and not applied.",
    Applying Spare "spare-applying" "The ghost has the new layout and the old content.",
    Applied Spare "spare-applied" "The ghost is of this epoch.",
    Joined Join "join-greeted" "A spare has been welcomed and has nothing.",
    Built Join "join-built" "The ghost stands for the first time; it is not acknowledged.",
    Decided Takeover "takeover-decided" "The term is ours; nothing has been done.",
    Restored Takeover "takeover-restored" "The ghost has its files and sockets.",
    Announced Takeover "takeover-announced" "The address is announced; nobody answers there.",
    Freed Takeover "takeover-freed" "The guest runs; it is not protected.",
    Told Takeover "takeover-told" "All is done but the next checkpoint.",
}

/// Passes a point: the end of this process, if a test wants it here.
#[inline]
pub fn pass(point: KillPoint) {
    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    if let Some(file) = FILE.get_or_init(|| std::env::var_os(VARIABLE).map(PathBuf::from)) {
        die_if_wanted(file, point);
    }
}

#[cold]
fn die_if_wanted(file: &PathBuf, point: KillPoint) {
    let wanted = std::fs::read_to_string(file).is_ok_and(|text| text.trim() == point.name());
    let reached = file.with_extension("reached");
    // Whoever renames it is the one that dies.
    if wanted && std::fs::rename(file, reached).is_ok() {
        let me = nix::unistd::Pid::this();
        let _ = nix::sys::signal::kill(me, nix::sys::signal::Signal::SIGKILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_tell_the_role() {
        for (index, point) in KillPoint::ALL.iter().enumerate() {
            let role = format!("{:?}-", point.role()).to_lowercase();
            assert!(point.name().starts_with(&role), "{point:?}");
            let same = |other: &&KillPoint| other.name() == point.name();
            assert_eq!(KillPoint::ALL.iter().filter(same).count(), 1);
            assert_eq!(*point as usize, index);
        }
    }
}
