// Writes to its standard streams in every way, and reads what it is given.
#include <cstdio>
#include <iostream>
#include <string>
#include <unistd.h>

int main() {
    printf("printf %d\n", 1);
    fflush(stdout);
    for (int i = 0; i < 3000; i++) std::cout << "cout " << i << "\n";
    std::cout.flush();
    puts("puts");
    putchar('c');
    fwrite("fwrite\n", 1, 7, stdout);
    fflush(stdout);
    if (write(1, "write\n", 6) != 6) return 1;
    fprintf(stderr, "stderr\n");
    std::cerr << "cerr\n";
    if (!isatty(0)) {
        std::string line;
        char text[64];
        if (fgets(text, sizeof text, stdin)) printf("first %s", text);
        int count = 0;
        while (std::getline(std::cin, line)) count++;
        std::cout << count << " lines\n";
    }
}
