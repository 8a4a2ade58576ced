import java.io.*;
import java.net.*;
import java.util.*;
import java.util.concurrent.*;

/** A key-value server with a client of its own. */
public class Server {
    public static void main(String[] arguments) throws Exception {
        Map<Integer, String> values = new ConcurrentHashMap<>();
        for (int key = 0; key < 200_000; key++)
            values.put(key, String.format("value %080d", key));
        ServerSocket listener = new ServerSocket(7002, 50, InetAddress.getLoopbackAddress());
        Thread server = new Thread(() -> serve(listener, values));
        server.setDaemon(true);
        server.start();
        Socket socket = new Socket(InetAddress.getLoopbackAddress(), 7002);
        BufferedReader in = new BufferedReader(new InputStreamReader(socket.getInputStream()));
        Writer out = new OutputStreamWriter(socket.getOutputStream());
        Random random = new Random();
        for (long n = 1;; n++) {
            out.write(random.nextInt(values.size()) + "\n");
            out.flush();
            if (in.readLine() == null)
                throw new IOException("no reply");
            if (n % 1000 == 0)
                System.out.println(n);
            Thread.sleep(0, 200_000);
        }
    }

    static void serve(ServerSocket listener, Map<Integer, String> values) {
        try (Socket socket = listener.accept()) {
            BufferedReader in = new BufferedReader(new InputStreamReader(socket.getInputStream()));
            Writer out = new OutputStreamWriter(socket.getOutputStream());
            for (String line; (line = in.readLine()) != null; out.flush())
                out.write(values.get(Integer.parseInt(line)) + "\n");
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }
}
